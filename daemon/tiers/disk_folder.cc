// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/disk_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/tier/disk_error.h"
#include "storage/tier/file_owner.h"

namespace ashlar::daemon {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kDamaged = "records.damaged-";

// Opens a file or folder of the tier by its name in the folder `in`. Invalid if it does not exist.
absl::StatusOr<UniqueFd> Narrow(const std::string& path, int in, const std::string& name) {
  UniqueFd file(openat(in, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    if (errno == ENOENT) return UniqueFd();  // RocksDB creates and removes files
    if (errno == ELOOP) return storage::IsLink(path);
    return storage::DiskError(errno, absl::StrCat("cannot open ", path));
  }
  if (absl::Status owned = storage::CheckOwner(path, info); !owned.ok()) return owned;
  const mode_t mode = S_ISDIR(info.st_mode) ? 0700 : 0600;
  if ((info.st_mode & 0777) == mode || fchmod(file.get(), mode) == 0) return file;
  return storage::DiskError(errno, absl::StrCat("cannot set the mode of ", path));
}

// Opens a folder with all of its files.
absl::Status NarrowAll(const std::string& path, int in, const std::string& name) {
  absl::StatusOr<UniqueFd> folder = Narrow(path, in, name);
  if (!folder.ok()) return folder.status();
  if (!folder->valid()) return absl::OkStatus();
  const int listed = dup(folder->get());
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fdopendir(listed), closedir);
  if (entries == nullptr) {
    const absl::Status status = storage::DiskError(errno, absl::StrCat("cannot read ", path));
    close(listed);
    return status;
  }
  while (const dirent* const entry = readdir(entries.get())) {
    const std::string file = entry->d_name;
    if (file == "." || file == "..") continue;
    if (auto narrowed = Narrow(absl::StrCat(path, "/", file), folder->get(), file); !narrowed.ok()) {
      return narrowed.status();
    }
  }
  return absl::OkStatus();
}

// Folders that were quarantined before, oldest first: their names contain the time.
std::vector<fs::path> QuarantinedFolders(const std::string& folder) {
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

absl::StatusOr<UniqueFd> OpenPrivate(const std::string& folder) {
  fs::path made;
  for (const fs::path& part : fs::path(folder)) {
    made /= part;
    if (mkdir(made.c_str(), 0700) != 0 && errno != EEXIST) {
      return storage::DiskError(errno, absl::StrCat("cannot create ", made.string()));
    }
  }
  UniqueFd opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));  // it may be reached by a link
  struct stat info {};
  if (!opened.valid() || fstat(opened.get(), &info) != 0) {
    if (errno == ENOTDIR) return absl::FailedPreconditionError(absl::StrCat(folder, ": is not a directory"));
    return storage::DiskError(errno, absl::StrCat("cannot open ", folder));
  }
  if (absl::Status owned = storage::CheckOwner(folder, info); !owned.ok()) return owned;
  if ((info.st_mode & S_IWOTH) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, ": other users can write to it; expected mode 0700; check its contents, then chmod or remove it"));
  }
  if ((info.st_mode & 0777) != 0700 && fchmod(opened.get(), 0700) != 0) {
    return storage::DiskError(errno, absl::StrCat("cannot set the mode of ", folder));
  }
  for (const char* const name : {"slab", "forgotten"}) {
    auto narrowed = Narrow(absl::StrCat(folder, "/", name), opened.get(), name);
    if (!narrowed.ok()) return narrowed.status();
  }
  std::vector<fs::path> folders = QuarantinedFolders(folder);
  folders.emplace_back(RecordsFolder(folder));
  for (const fs::path& each : folders) {
    absl::Status narrowed = NarrowAll(each.string(), opened.get(), each.filename().string());
    if (!narrowed.ok()) return narrowed;
  }
  return opened;
}

absl::StatusOr<std::string> QuarantineRecords(const std::string& folder, std::time_t now) {
  const std::string date = absl::FormatTime("%Y%m%dT%H%M%SZ", absl::FromTimeT(now), absl::UTCTimeZone());
  std::error_code error;
  std::string target = absl::StrCat(folder, "/", kDamaged, date);
  for (int i = 1; fs::exists(target, error); ++i) target = absl::StrCat(folder, "/", kDamaged, date, "-", i);
  // The oldest is removed first, because a full disk needs its space.
  const std::vector<fs::path> before = QuarantinedFolders(folder);
  for (size_t i = 0; i + kQuarantinesKept <= before.size(); ++i) fs::remove_all(before[i], error);
  fs::rename(RecordsFolder(folder), target, error);
  if (error) return storage::DiskError(error.value(), absl::StrCat("cannot rename ", RecordsFolder(folder)));
  return target;
}

}  // namespace ashlar::daemon
