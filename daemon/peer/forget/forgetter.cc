#include "daemon/peer/forget/forgetter.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/unique_fd.h"
#include "proto/regular_file.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kForgetAgain = 1'000'000'000;
constexpr char kCannotYet[] = "what the cluster forgets cannot be forgotten yet";
constexpr size_t kIdDigits = 2 * std::tuple_size_v<ClusterForgetting::Id>;

std::string ForgottenFile(const std::string& folder) {
  return folder + "/forgotten";
}

std::string HexOf(const ClusterForgetting::Id& id) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}

// A line that is none names no forgetting: that is done again.
std::set<ClusterForgetting::Id> ReadForgotten(const std::string& folder) {
  std::set<ClusterForgetting::Id> ids;
  if (folder.empty()) return ids;
  constexpr size_t kMostBytes = 2 * kMostForgettings * (kIdDigits + 1);
  const absl::StatusOr<std::string> text = ReadRegularFile("", ForgottenFile(folder), kMostBytes);
  if (!text.ok()) return ids;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    if (line.size() != kIdDigits || !std::ranges::all_of(line, [](unsigned char c) { return std::isxdigit(c); })) {
      continue;
    }
    const std::string bytes = absl::HexStringToBytes(line);
    ClusterForgetting::Id id;
    std::ranges::copy(bytes, id.begin());
    ids.insert(id);
  }
  return ids;
}

// Durably, and in whole or not at all.
absl::Status WriteForgotten(const std::string& folder, const std::set<ClusterForgetting::Id>& ids) {
  const std::string path = ForgottenFile(folder), part = path + ".part";
  std::string text;
  for (const ClusterForgetting::Id& id : ids) absl::StrAppend(&text, HexOf(id), "\n");
  UniqueFd file(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  const auto failed = [](const std::string& what) { return absl::ErrnoToStatus(errno, what); };
  if (!file.valid()) return failed(absl::StrCat("cannot write ", part));
  for (size_t at = 0; at < text.size();) {
    const ssize_t written = write(file.get(), text.data() + at, text.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return failed(absl::StrCat("cannot write ", part));
    at += static_cast<size_t>(written);
  }
  if (fsync(file.get()) != 0) return failed(absl::StrCat("cannot sync ", part));
  if (std::rename(part.c_str(), path.c_str()) != 0) return failed(absl::StrCat("cannot write ", path));
  UniqueFd directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.valid() || fsync(directory.get()) != 0) return failed(absl::StrCat("cannot sync ", folder));
  return absl::OkStatus();
}

}  // namespace

Forgetter::Forgetter(storage::Executor* disk_io, const storage::Clock& clock, Directory& directory,
                     std::vector<std::string> names, std::string folder)
    : disk_io_(disk_io), clock_(clock), directory_(directory), names_(std::move(names)), folder_(std::move(folder)) {
  Read();
}

// Not by the caller: the disk may hang.
void Forgetter::Read() {
  read_ = folder_.empty();
  if (read_) return;
  const auto found = std::make_shared<std::set<ClusterForgetting::Id>>();
  reading_ = disk_io_->Run(
      storage::kNoTenant, [found, folder = folder_] { *found = ReadForgotten(folder); },
      [this, found] {
        recorded_ = std::move(*found);
        read_ = true;
        if (changed_) Changed();  // not before: what the directory does not know is dropped from the record
      });
}

void Forgetter::Start(storage::Cache& cache,
                      std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> forget_beside) {
  cache_ = &cache;
  forget_beside_ = std::move(forget_beside);
}

void Forgetter::Changed() {
  changed_ = true;
  if (!read_) return;
  known_ = directory_.Forgettings();
  const auto is_known = [this](const ClusterForgetting::Id& id) {
    return std::ranges::find(known_, id, &ClusterForgetting::id) != known_.end();
  };
  std::erase_if(progress_, [&](const auto& one) { return !is_known(one.first); });
  std::erase_if(recorded_, [&](const ClusterForgetting::Id& id) { return !is_known(id); });
  const auto under_way = todo_.empty() ? ClusterForgetting::Id{} : todo_.front().id;
  todo_.clear();
  for (const ClusterForgetting& one : known_) {
    if (!recorded_.contains(one.id)) todo_.push_back(one);
  }
  if (running_ != nullptr) {
    const auto same = std::ranges::find(todo_, under_way, &ClusterForgetting::id);
    if (same == todo_.end()) {
      running_ = nullptr;
    } else {
      std::rotate(todo_.begin(), same, same + 1);
    }
  }
  int64_t done = 0;
  for (const ClusterForgetting& one : known_) {
    if (!recorded_.contains(one.id)) break;
    done = one.revision;
  }
  directory_.Forgot(done);
}

const storage::Forgetting::Progress* Forgetter::Find(const ClusterForgetting::Id& id) const {
  const auto found = progress_.find(id);
  return found == progress_.end() ? nullptr : &found->second;
}

void Forgetter::TryLater(const char* what, const absl::Status& why) {
  retry_at_ = clock_.Now() + kForgetAgain;
  if (std::exchange(told_failure_, true)) return;
  Log(LogLevel::kWarning, what,
      {{"tenant", todo_.front().tenant}, {"by", todo_.front().node}, {"error", std::string(why.message())}});
}

void Forgetter::Begin() {
  const ClusterForgetting& wish = todo_.front();
  const auto found = std::ranges::find(names_, wish.tenant);
  const bool known = found != names_.end();  // else the disk may have something of it
  const auto tenant = known ? static_cast<storage::TenantId>(found - names_.begin()) : storage::kNoTenant;
  absl::StatusOr<std::shared_ptr<storage::Forgetting>> begun = cache_->upkeep().Forget(tenant, wish.tenant, wish.ns);
  if (!begun.ok()) return TryLater(kCannotYet, begun.status());
  if (known) forget_beside_(tenant, wish.ns);
  running_ = *std::move(begun);
}

void Forgetter::Tick() {
  if (!read_ && !reading_) Read();  // the queue was full
  if (todo_.empty() || saving_ || clock_.Now() < retry_at_) return;
  if (running_ == nullptr) Begin();
  if (running_ == nullptr) return;
  storage::Slice slice(clock_, clock_.Now() + EventLoop::kQuantum);
  const bool done = running_->Run(slice);
  progress_[todo_.front().id] = running_->progress();
  if (done) return Save();
  if (const absl::Status& overwritten = running_->progress().overwritten; !overwritten.ok()) {
    TryLater(kCannotYet, overwritten);
    // It begins anew once it is its turn again: a bad place on the disk holds up no other.
    running_ = nullptr;
    std::rotate(todo_.begin(), todo_.begin() + 1, todo_.end());
  }
}

void Forgetter::Save() {
  const ClusterForgetting::Id id = todo_.front().id;
  if (folder_.empty()) return Record(id);
  std::set<ClusterForgetting::Id> ids = recorded_;
  ids.insert(id);
  const auto written = std::make_shared<absl::Status>();
  saving_ = disk_io_->Run(
      storage::kNoTenant, [folder = folder_, ids = std::move(ids), written] { *written = WriteForgotten(folder, ids); },
      [this, id, written] {
        saving_ = false;
        if (written->ok()) return Record(id);
        if (!todo_.empty()) TryLater("what was forgotten cannot be noted, and is forgotten again", *written);
      });
  if (!saving_) TryLater(kCannotYet, absl::ResourceExhaustedError("the disk's queue is full"));
}

void Forgetter::Record(const ClusterForgetting::Id& id) {
  recorded_.insert(id);
  told_failure_ = false;
  const auto done = std::ranges::find(known_, id, &ClusterForgetting::id);
  if (done != known_.end()) {
    const storage::Forgetting::Progress progress =
        running_ == nullptr ? storage::Forgetting::Progress() : running_->progress();
    Log(LogLevel::kInfo, "forgotten, as the cluster was asked to",
        {{"tenant", done->tenant},
         {"namespace", done->ns.has_value() ? done->ns->Hex() : ""},
         {"by", done->node},
         {"objects", progress.forgotten.objects},
         {"bytes", progress.forgotten.bytes}});
  }
  running_ = nullptr;
  Changed();
}

}  // namespace ashlar::daemon
