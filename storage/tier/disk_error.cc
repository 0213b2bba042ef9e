// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/disk_error.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

absl::Status DiskError(int error, absl::string_view what) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(absl::StrCat(what, ": ", std::strerror(error)));
    case EROFS:
    case EIO:
    case EUCLEAN:  // the file system has detected damage
    case ENXIO:
    case ENODEV:
    case ESTALE:
    case ETIMEDOUT:
    case EREMOTEIO:
      return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
    default:
      return absl::ErrnoToStatus(error, what);
  }
}

bool MayPass(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
}

}  // namespace ashlar::storage
