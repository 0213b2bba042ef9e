// SPDX-License-Identifier: Apache-2.0
#include "proto/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/invalid.h"

namespace ashlar {
namespace {

const char* KindOf(mode_t mode) {
  return S_ISDIR(mode)                    ? "a folder"
         : S_ISFIFO(mode)                 ? "a FIFO"
         : S_ISSOCK(mode)                 ? "a socket"
         : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
                                          : "not a file";
}

}  // namespace

absl::StatusOr<std::string> ReadRegularFile(absl::string_view field, const std::string& path, size_t max_bytes) {
  const std::string prefix = field.empty() ? "" : absl::StrCat(field, ": ");
  const auto failed = [&] { return absl::ErrnoToStatus(errno, absl::StrCat(prefix, "cannot read ", path)); };
  // With O_NONBLOCK, opening a FIFO does not wait for a writer. Regular files ignore it.
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  if (file < 0) return failed();
  const absl::Cleanup closes = [file] { close(file); };
  struct stat info {};
  if (fstat(file, &info) != 0) return failed();
  if (!S_ISREG(info.st_mode)) {
    return Invalid(prefix, "cannot read ", path, ": it is ", KindOf(info.st_mode), "; give a regular file");
  }
  // Does not rely on the size: files of /proc report none, and a file may grow.
  std::string bytes;
  constexpr size_t kPiece = size_t{64} << 10;
  for (;;) {
    const size_t had = bytes.size();
    bytes.resize(had + std::min(kPiece, max_bytes + 1 - had));
    const ssize_t got = read(file, bytes.data() + had, bytes.size() - had);
    bytes.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed();
    if (got == 0) return bytes;
    if (bytes.size() > max_bytes) {
      return Invalid(prefix, "cannot read ", path, ": larger than ", max_bytes, " bytes; give a smaller file");
    }
  }
}

}  // namespace ashlar
