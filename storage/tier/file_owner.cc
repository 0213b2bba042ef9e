// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/file_owner.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

absl::Status CheckOwner(const std::string& path, const struct stat& info) {
  if (info.st_uid != geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": owned by user ", info.st_uid,
                                                      "; expected the daemon's user, ", geteuid(),
                                                      "; check its contents, then chown or remove it"));
  }
  if (S_ISREG(info.st_mode) && info.st_nlink > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": has ", info.st_nlink, " hard links; a write would change the other files; remove this one"));
  }
  return absl::OkStatus();
}

absl::Status IsLink(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat(path, ": is a symbolic link; symbolic links are not followed; remove it"));
}

}  // namespace ashlar::storage
