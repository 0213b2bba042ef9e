// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/memory/memory_lock.h"
#include "storage/memory/memory_reserve.h"

namespace ashlar::storage {
namespace {

absl::Status Refused(const char* call, int error) {
  return absl::ResourceExhaustedError(absl::StrCat("arena: ", absl::ErrnoToStatus(error, call).message()));
}

// Allocates all pages of a new memfd, with the nodes, page sizes and speed of the options.
absl::Status TakePages(int descriptor, void* data, uint64_t bytes, const ArenaOptions& options) {
  if (options.numa.mode != NumaPolicy::Mode::kAny) {
    if (absl::Status placed = SetNumaPolicy(data, bytes, options.numa); !placed.ok()) return placed;
  }
  ReserveOptions reserve;
  if (options.huge_pages && madvise(data, bytes, MADV_HUGEPAGE) == 0) reserve.advised = data;
  if (options.numa.mode == NumaPolicy::Mode::kBind) reserve.only_nodes = options.numa.nodes;
  if (absl::Status reserved = ReservePages(descriptor, bytes, reserve); absl::IsResourceExhausted(reserved)) {
    return absl::ResourceExhaustedError(absl::StrCat(reserved.message(), " or lower dram.capacity_bytes"));
  } else if (!reserved.ok()) {
    return reserved;
  }
  return options.lock ? LockPages(data, bytes) : absl::OkStatus();
}

}  // namespace

absl::StatusOr<Arena> Arena::Make(uint64_t bytes, const ArenaOptions& options) {
  const int descriptor = memfd_create("ashlar-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return Refused("memfd_create", errno);
  Arena arena(nullptr, bytes, descriptor);
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return Refused("ftruncate", errno);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) return Refused("mmap", errno);
  arena.data_ = static_cast<std::byte*>(data);
  if (absl::Status taken = TakePages(descriptor, data, bytes, options); !taken.ok()) {
    return absl::Status(taken.code(), absl::StrCat("arena: ", taken.message()));
  }
  if (options.gpu != nullptr) {
    kernels::ArenaError error;
    arena.registration_ = options.gpu->Register(data, bytes, &error);
    if (arena.registration_ == nullptr) return absl::ResourceExhaustedError(absl::StrCat("arena: ", error.message));
  }
  // The mapping above stays writable. Later mappings are read-only, and the seals are final.
  if (fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return absl::FailedPreconditionError(
        "arena: the kernel does not support F_SEAL_FUTURE_WRITE; use Linux 5.1 or later");
  }
  return arena;
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      registration_(std::move(other.registration_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(registration_, other.registration_);
  return *this;
}

Arena::~Arena() {
  registration_ = nullptr;
  if (data_ != nullptr) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace ashlar::storage
