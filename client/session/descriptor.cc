// SPDX-License-Identifier: Apache-2.0
#include "client/session/descriptor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace ashlar::internal {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

absl::StatusOr<Descriptor> Descriptor::Duplicate(int fd) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return absl::ErrnoToStatus(errno, "duplicating a descriptor");
  return Descriptor(copy);
}

absl::StatusOr<Mapping> Mapping::Map(int memfd, uint64_t bytes, Access access) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0, nothing to map");
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0)
    return absl::InvalidArgumentError("memfd: not a file that can be sealed (memfd_create, MFD_ALLOW_SEALING)");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("memfd: not sealed with F_SEAL_SHRINK, it could be cut off while it is in use");
  }
  struct stat file {};
  if (::fstat(memfd, &file) != 0) return absl::ErrnoToStatus(errno, "fstat");
  if (static_cast<uint64_t>(file.st_size) < bytes) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, " are more than the memfd's ", file.st_size));
  }
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, memfd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (error == EPERM || error == EACCES) return absl::InvalidArgumentError("memfd: sealed against writing");
    return absl::ErrnoToStatus(error, "mapping a memfd");
  }
  return Mapping(static_cast<std::byte*>(data), bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace ashlar::internal
