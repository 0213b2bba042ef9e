// SPDX-License-Identifier: Apache-2.0
// Region: memory that the daemon shares with one engine. It is the engine's own memfd, a memfd that was made for it
// (hosted_memory.h), or memory of a GPU of either kind.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/session/budget.h"
#include "daemon/session/region_guard.h"
#include "kernels/gpu.h"

namespace ashlar::daemon {

// The budgets to which regions are charged. Each region is one mapping and one descriptor of the daemon's, whatever its
// size, and so counts as kLeastRegionBytes at least.
struct RegionBudgets {
  std::shared_ptr<Budget> bytes, number;
};
inline constexpr uint64_t kLeastRegionBytes = uint64_t{64} << 10;
inline uint64_t ChargedFor(uint64_t region_bytes) {
  return std::max(region_bytes, kLeastRegionBytes);
}

// A mapping for reading and writing. Every reader and writer holds a shared_ptr; it is unmapped with the last one.
class Region {
 public:
  // Maps `bytes` of a memfd. INVALID_ARGUMENT, naming the field of RegisterRegion, unless it is a memfd of
  // at least that size, writable, on ordinary pages and sealed with F_SEAL_SHRINK: a file that could shrink under the
  // daemon would kill it with SIGBUS. Seals it with F_SEAL_GROW, too, and frees what it has behind its end: pages there
  // would be counted for those that are missing inside.
  static absl::StatusOr<std::shared_ptr<Region>> Register(const UniqueFd& memfd, uint64_t bytes);

  // The daemon never touches a page that is not there: it would be allocated at its charge, and the kernel kills where
  // there is no memory for it. So a memfd gets its pages before it is used, and what the engine frees of them later is
  // noticed before the next use.
  //
  // Of the whole memfd, for holes are counted, not found.
  struct Extent {
    uint64_t file_bytes = 0, missing_bytes = 0;
  };
  Extent Measure() const;  // a GPU's has all
  // Takes the pages that are missing, where the machine has them and `keep_free` more. RESOURCE_EXHAUSTED, naming the
  // field of RegisterRegion, where it has not. Many gigabytes take seconds.
  absl::Status TakePages(uint64_t keep_free) const;
  // INVALID_ARGUMENT, naming `field`, where pages are missing, or the region is lost. A system call.
  absl::Status CheckWhole(absl::string_view field) const;

  // From now on a page that is missing when the daemon touches it costs the daemon nothing, and the region is lost for
  // good. Before anybody uses it; null guards nothing.
  void GuardWith(RegionGuard* guard) { guarded_ = guard == nullptr ? nullptr : guard->Guard(data_, size_); }
  bool lost() const { return guarded_ != nullptr && guarded_->lost(); }

  // Another descriptor of the same memfd, in place of the one that it was registered with. Before anybody uses it.
  void UseDescriptor(std::shared_ptr<const UniqueFd> memfd) { memfd_ = std::move(memfd); }

  // Maps an allocation of exactly `bytes` on the GPU. RESOURCE_EXHAUSTED if the GPU has no room for the mapping,
  // INVALID_ARGUMENT if the descriptor is none of such an allocation.
  static absl::StatusOr<std::shared_ptr<Region>> Import(const kernels::Gpu& gpu, const UniqueFd& descriptor,
                                                        uint64_t bytes);
  // Makes a region of `bytes` or more on the GPU, all zero. RESOURCE_EXHAUSTED if the GPU has no room.
  struct OnGpu {
    std::shared_ptr<Region> region;
    UniqueFd descriptor;  // the engine's
  };
  static absl::StatusOr<OnGpu> Make(const kernels::Gpu& gpu, uint64_t bytes);

  // Returns the same region, to be unmapped on the thread of `loop` in its tenant's turn, whichever holder is the last:
  // unmapping much memory takes long. The loop must outlive it.
  static std::shared_ptr<Region> UnmapOn(EventLoop& loop, storage::TenantId tenant, std::shared_ptr<Region> region);

  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const kernels::Gpu* gpu() const { return gpu_; }  // in whose memory it lies; null: the processor's
  std::byte* data() const { return data_; }         // of a GPU's: for its kernels alone
  uint64_t size() const { return size_; }
  bool Contains(uint64_t offset, uint64_t bytes) const { return offset <= size_ && bytes <= size_ - offset; }

  // Releases `kept` (the memory's charges) after unmapping, before `gone` is called.
  void Keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }
  // The block of HostedMemory in which it lies, or a number that no other memory ever gets; 0: the engine's own memory.
  void SetBlock(uint64_t block) { block_ = block; }
  uint64_t block() const { return block_; }

  // `gone` is called after unmapping, on the thread that unmaps. Set it at most once, while holding a reference.
  void WhenGone(std::function<void()> gone) { gone_ = std::move(gone); }

 private:
  Region(std::byte* data, uint64_t size) : data_(data), size_(size) {}
  Region(const kernels::Gpu& gpu, std::unique_ptr<kernels::ArenaMemory> arena)
      : data_(arena->data()), size_(arena->bytes()), gpu_(&gpu), arena_(std::move(arena)) {}
  static absl::StatusOr<std::shared_ptr<Region>> Map(int fd, uint64_t bytes);

  std::byte* const data_;
  const uint64_t size_;
  std::shared_ptr<const UniqueFd> memfd_;
  std::unique_ptr<RegionGuard::Guarded> guarded_;
  const kernels::Gpu* const gpu_ = nullptr;
  std::unique_ptr<kernels::ArenaMemory> arena_;  // of the GPU; null: a mapping
  uint64_t block_ = 0;
  std::shared_ptr<const void> kept_;
  std::function<void()> gone_;
};

}  // namespace ashlar::daemon
