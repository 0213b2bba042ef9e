// SPDX-License-Identifier: Apache-2.0
// Arena: a slab of shared memory that engines can map but not write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "storage/memory/numa.h"

namespace ashlar::storage {

struct ArenaOptions {
  bool huge_pages = false;  // requests transparent huge pages; ignored by kernels without them
  bool lock = false;        // never swapped out
  NumaPolicy numa;
  const kernels::Gpu* gpu = nullptr;  // GPU that must be able to access the arena; null for none
};

// A memfd, mapped writable here and then sealed: its size is fixed, and every later mapping in any process is read-only
// (F_SEAL_FUTURE_WRITE, Linux 5.1). A mapping cannot be revoked, so an arena belongs to one tenant permanently.
class Arena final : public kernels::ArenaMemory {
 public:
  // `bytes` must be positive and a multiple of the page size. RESOURCE_EXHAUSTED with the system's reason if memory,
  // address space, descriptors or lockable memory are used up, or the GPU cannot access it. FAILED_PRECONDITION if the
  // kernel cannot seal, or cannot bind memory to nodes. All pages are allocated, so writing to an arena cannot fail.
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
