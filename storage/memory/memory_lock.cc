// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/memory_lock.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

// mlock2, because sanitizers replace mlock by a no-op.

absl::Status AllowLocking(uint64_t bytes) {
  rlimit limit;
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return absl::ErrnoToStatus(errno, "getrlimit(RLIMIT_MEMLOCK)");
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return absl::ErrnoToStatus(errno, "setrlimit(RLIMIT_MEMLOCK)");
  // The kernel counts address space. Pages locked on touch are not touched here.
  void* space = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return absl::FailedPreconditionError(absl::ErrnoToStatus(errno, "mmap").message());
  const int refused = mlock2(space, bytes, MLOCK_ONFAULT) == 0 ? 0 : errno;
  munmap(space, bytes);
  if (refused == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(bytes, " bytes cannot be locked; the limit is ", limit.rlim_max,
                   " bytes (RLIMIT_MEMLOCK; \"ulimit -l\" counts KiB); raise it, or grant CAP_IPC_LOCK (",
                   absl::ErrnoToStatus(refused, "mlock").message(), ")"));
}

absl::Status LockPages(const void* mapping, uint64_t bytes) {
  if (mlock2(mapping, bytes, 0) == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::ErrnoToStatus(errno, "mlock").message());
}

}  // namespace ashlar::storage
