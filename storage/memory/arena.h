// SPDX-License-Identifier: Apache-2.0
// Arena: one slab of shared memory that engines can map, but never write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "storage/memory/numa.h"

namespace ashlar::storage {

struct ArenaOptions {
  bool huge_pages = false;  // ask for transparent huge pages; a kernel that has none is not an error
  bool lock = false;        // never swapped out
  NumaPolicy numa;
  const kernels::Gpu* gpu = nullptr;  // that shall reach arenas; null: none
};

// A memfd, mapped writable here and then sealed: its size is fixed, and every later mapping, in any process, is
// read-only (F_SEAL_FUTURE_WRITE, Linux 5.1). A mapping handed out cannot be taken back, therefore an arena belongs to
// one tenant for life.
class Arena final : public kernels::ArenaMemory {
 public:
  // `bytes` > 0, a multiple of the page size. RESOURCE_EXHAUSTED with the system's reason where there is no memory,
  // address space or descriptor left, no more may be locked, or the GPU cannot reach it; FAILED_PRECONDITION where the
  // kernel cannot seal, or not place memory on nodes. All pages are reserved: writing to an arena never fails.
  static absl::StatusOr<Arena> Make(uint64_t bytes, const ArenaOptions& options);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena() override;

  kernels::MemoryKind kind() const override { return kernels::MemoryKind::kHost; }
  std::byte* data() const override { return data_; }
  uint64_t bytes() const override { return bytes_; }
  int descriptor() const override { return descriptor_; }

 private:
  Arena(std::byte* data, uint64_t bytes, int descriptor) : data_(data), bytes_(bytes), descriptor_(descriptor) {}

  std::byte* data_;
  uint64_t bytes_;
  int descriptor_;
  std::unique_ptr<kernels::HostRegistration> registration_;
};

}  // namespace ashlar::storage
