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
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0; expected a positive size");
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0)
    return absl::InvalidArgumentError("memfd: cannot be sealed; create it with memfd_create and MFD_ALLOW_SEALING");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("memfd: may shrink while in use; seal it with F_SEAL_SHRINK");
  }
  struct stat file {};
  if (::fstat(memfd, &file) != 0) return absl::ErrnoToStatus(errno, "fstat");
  if (static_cast<uint64_t>(file.st_size) < bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, "; expected at most ", file.st_size, ", the size of the memfd"));
  }
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, memfd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (error == EPERM || error == EACCES)
      return absl::InvalidArgumentError("memfd: not writable (F_SEAL_WRITE, or opened for reading only)");
    return absl::ErrnoToStatus(error, "mapping a memfd");
  }
  return Mapping(static_cast<std::byte*>(data), bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace ashlar::internal
