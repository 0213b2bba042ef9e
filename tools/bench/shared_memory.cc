// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ashlar::bench {

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Make(size_t bytes) {
  const int memfd = memfd_create("ashlar-bench", MFD_CLOEXEC);
  if (memfd < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  void* data = MAP_FAILED;
  if (ftruncate(memfd, static_cast<off_t>(bytes)) == 0) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  }
  const int error = errno;
  close(memfd);
  if (data == MAP_FAILED) return absl::ErrnoToStatus(error, "shared memory");
  std::memset(data, 1, bytes);
  return std::unique_ptr<SharedMemory>(new SharedMemory({static_cast<std::byte*>(data), bytes}));
}

SharedMemory::~SharedMemory() {
  munmap(bytes_.data(), bytes_.size());
}

}  // namespace ashlar::bench
