// SPDX-License-Identifier: Apache-2.0
// Region: memory that the daemon shares with one engine: the engine's own memfd, a memfd that the daemon created
// (hosted_memory.h), or the engine's own GPU memory.
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

// The budgets that regions are charged to. A region is one mapping and one descriptor of the daemon, and counts as at
// least kLeastRegionBytes.
struct RegionBudgets {
  std::shared_ptr<Budget> bytes, number;
};
inline constexpr uint64_t kLeastRegionBytes = uint64_t{64} << 10;
inline uint64_t ChargedFor(uint64_t region_bytes) {
  return std::max(region_bytes, kLeastRegionBytes);
}

// A read-write mapping. Every reader and writer holds a shared_ptr; the last one unmaps it.
class Region {
 public:
  // Maps `bytes` of a memfd. INVALID_ARGUMENT names the field of RegisterRegion unless it is a writable memfd of at
  // least that size, on ordinary pages, and sealed with F_SEAL_SHRINK: a file that shrinks under the daemon would kill
  // it with SIGBUS. Also seals it with F_SEAL_GROW, and frees pages past its end, which would otherwise be counted in
  // place of missing pages inside.
  static absl::StatusOr<std::shared_ptr<Region>> Register(const UniqueFd& memfd, uint64_t bytes);

  // The daemon never touches a missing page: it would be allocated at the daemon's charge, and the kernel kills the
  // daemon if there is no memory. So the pages of a memfd are allocated before it is used, and freed pages are detected
  // before the next use.
  //
  // The extent describes the whole memfd, because holes are counted, not located.
  struct Extent {
    uint64_t file_bytes = 0, missing_bytes = 0;
  };
  Extent Measure() const;  // GPU memory is always complete
  // Allocates the missing pages if the machine has the memory and `keep_free` more. RESOURCE_EXHAUSTED names the field
  // of RegisterRegion otherwise. Takes seconds for many gigabytes.
  absl::Status TakePages(uint64_t keep_free) const;
  // INVALID_ARGUMENT names `field` if pages are missing or the region is lost. One system call.
  absl::Status CheckWhole(absl::string_view field) const;

  // From now on, touching a missing page costs the daemon nothing, and the region is lost permanently. Call before the
  // first use; null disables the guard.
  void GuardWith(RegionGuard* guard) { guarded_ = guard == nullptr ? nullptr : guard->Guard(data_, size_); }
  bool lost() const { return guarded_ != nullptr && guarded_->lost(); }

  // Replaces the descriptor by another one of the same memfd. Call before the first use.
  void UseDescriptor(std::shared_ptr<const UniqueFd> memfd) { memfd_ = std::move(memfd); }

  // Maps an allocation of exactly `bytes` on the GPU. RESOURCE_EXHAUSTED if the GPU cannot map it, INVALID_ARGUMENT if
  // the descriptor does not belong to such an allocation.
  static absl::StatusOr<std::shared_ptr<Region>> Import(const kernels::Gpu& gpu, const UniqueFd& descriptor,
                                                        uint64_t bytes);

  // Returns the same region with a deleter that unmaps it on the thread of `loop` in its tenant's turn, because
  // unmapping much memory takes long. The loop must outlive it.
  static std::shared_ptr<Region> UnmapOn(EventLoop& loop, storage::TenantId tenant, std::shared_ptr<Region> region);

  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const kernels::Gpu* gpu() const { return gpu_; }  // null for host memory
  std::byte* data() const { return data_; }         // GPU memory is accessible only to kernels
  uint64_t size() const { return size_; }
  bool Contains(uint64_t offset, uint64_t bytes) const { return offset <= size_ && bytes <= size_ - offset; }

  // Releases `kept` (the memory's charges) after unmapping, before `gone` is called.
  void Keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }
  // The block of HostedMemory that contains it; 0 for the engine's own memory.
  void SetBlock(uint64_t block) { block_ = block; }
  uint64_t block() const { return block_; }

  // `gone` is called after unmapping, on the unmapping thread. Set it at most once, while holding a reference.
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
  std::unique_ptr<kernels::ArenaMemory> arena_;  // GPU memory; null for a mapping
  uint64_t block_ = 0;
  std::shared_ptr<const void> kept_;
  std::function<void()> gone_;
};

}  // namespace ashlar::daemon
