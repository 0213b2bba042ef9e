#include "daemon/tiers/disk_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/unique_fd.h"
#include "storage/tier/disk_error.h"

namespace ashlar::daemon {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kDamaged = "records.damaged-";

// Not through links, which may name files that are none of the tier's.
absl::Status Narrow(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    // A link is not followed, and what was removed meanwhile need not be narrowed.
    if (errno == ELOOP || errno == ENOENT) return absl::OkStatus();
    return storage::DiskError(errno, absl::StrCat("cannot open ", path));
  }
  const mode_t mode = S_ISDIR(info.st_mode) ? 0700 : 0600;
  if ((info.st_mode & 0777) == mode || fchmod(file.get(), mode) == 0) return absl::OkStatus();
  if (errno != EPERM) return storage::DiskError(errno, absl::StrCat("cannot set the mode of ", path));
  Log(LogLevel::kWarning, "a file of the ssd tier belongs to another user, who may read it", {{"path", path}});
  return absl::OkStatus();
}

absl::Status NarrowAll(const std::string& folder) {
  if (absl::Status status = Narrow(folder); !status.ok()) return status;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (absl::Status status = Narrow(entry->path().string()); !status.ok()) return status;
  }
  return error ? storage::DiskError(error.value(), absl::StrCat("cannot read ", folder)) : absl::OkStatus();
}

// Those that were set aside before, the oldest first: their names say when.
std::vector<fs::path> SetAsideBefore(const std::string& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), kDamaged)) found.push_back(entry->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::string RecordsFolder(const std::string& folder) {
  return folder + "/records";
}

absl::Status MakePrivate(const std::string& folder) {
  fs::path made;
  for (const fs::path& part : fs::path(folder)) {
    made /= part;
    if (mkdir(made.c_str(), 0700) != 0 && errno != EEXIST) {
      return storage::DiskError(errno, absl::StrCat("cannot make ", made.string()));
    }
  }
  std::error_code error;
  const fs::path whole = fs::canonical(folder, error);  // the folder itself may be reached by a link
  if (error) return storage::DiskError(error.value(), absl::StrCat("cannot find ", folder));
  if (!fs::is_directory(whole, error)) return absl::FailedPreconditionError(absl::StrCat(folder, ": is not a folder"));
  if (absl::Status status = Narrow(whole.string()); !status.ok()) return status;
  if (absl::Status status = Narrow(folder + "/slab"); !status.ok()) return status;
  for (const fs::path& damaged : SetAsideBefore(folder)) {
    if (absl::Status status = NarrowAll(damaged.string()); !status.ok()) return status;
  }
  const std::string records = RecordsFolder(folder);
  return fs::exists(records, error) ? NarrowAll(records) : absl::OkStatus();
}

absl::StatusOr<std::string> SetAside(const std::string& folder, std::time_t now) {
  const std::string date = absl::FormatTime("%Y%m%dT%H%M%SZ", absl::FromTimeT(now), absl::UTCTimeZone());
  std::error_code error;
  std::string target = absl::StrCat(folder, "/", kDamaged, date);
  for (int i = 1; fs::exists(target, error); ++i) target = absl::StrCat(folder, "/", kDamaged, date, "-", i);
  // The oldest is removed first: on a full disk its room is needed.
  const std::vector<fs::path> before = SetAsideBefore(folder);
  for (size_t i = 0; i + kSetAsideKept <= before.size(); ++i) fs::remove_all(before[i], error);
  fs::rename(RecordsFolder(folder), target, error);
  if (error) return storage::DiskError(error.value(), absl::StrCat("cannot rename ", RecordsFolder(folder)));
  return target;
}

}  // namespace ashlar::daemon
