// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/erase/eraser.h"

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
#include "proto/hex.h"
#include "proto/regular_file.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kEraseAgain = 1'000'000'000;
constexpr char kCannotYet[] = "erasure delayed";
constexpr size_t kIdDigits = 2 * std::tuple_size_v<ClusterErasure::Id>;

std::string ErasedFile(const std::string& folder) {
  return folder + "/forgotten";
}

std::string HexOf(const ClusterErasure::Id& id) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}

// An invalid line names no erasure; that erasure is repeated.
std::set<ClusterErasure::Id> ReadErased(const std::string& folder) {
  std::set<ClusterErasure::Id> ids;
  if (folder.empty()) return ids;
  constexpr size_t kMostBytes = 2 * kMostErasures * (kIdDigits + 1);
  const absl::StatusOr<std::string> text = ReadRegularFile("", ErasedFile(folder), kMostBytes);
  if (!text.ok()) return ids;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    if (line.size() != kIdDigits || !std::ranges::all_of(line, [](unsigned char c) { return std::isxdigit(c); })) {
      continue;
    }
    const std::string bytes = BytesOfHex(line);
    ClusterErasure::Id id;
    std::ranges::copy(bytes, id.begin());
    ids.insert(id);
  }
  return ids;
}

// Durable and atomic.
absl::Status WriteErased(const std::string& folder, const std::set<ClusterErasure::Id>& ids) {
  const std::string path = ErasedFile(folder), part = path + ".part";
  std::string text;
  for (const ClusterErasure::Id& id : ids) absl::StrAppend(&text, HexOf(id), "\n");
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

Eraser::Eraser(storage::Executor* disk_io, const storage::Clock& clock, Directory& directory,
               std::vector<std::string> names, std::string folder)
    : disk_io_(disk_io), clock_(clock), directory_(directory), names_(std::move(names)), folder_(std::move(folder)) {
  Read();
}

// Not on the caller's thread, because the disk may hang.
void Eraser::Read() {
  read_ = folder_.empty();
  if (read_) return;
  const auto found = std::make_shared<std::set<ClusterErasure::Id>>();
  reading_ = disk_io_->Run(
      storage::kNoTenant, [found, folder = folder_] { *found = ReadErased(folder); },
      [this, found] {
        recorded_ = std::move(*found);
        read_ = true;
        if (changed_) Changed();  // only now: it drops recorded erasures that the directory does not know
      });
}

void Eraser::Start(storage::Cache& cache,
                   std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages) {
  cache_ = &cache;
  erase_texts_and_pages_ = std::move(erase_texts_and_pages);
}

void Eraser::Changed() {
  changed_ = true;
  if (!read_) return;
  known_ = directory_.Erasures();
  const auto is_known = [this](const ClusterErasure::Id& id) {
    return std::ranges::find(known_, id, &ClusterErasure::id) != known_.end();
  };
  std::erase_if(progress_, [&](const auto& one) { return !is_known(one.first); });
  std::erase_if(recorded_, [&](const ClusterErasure::Id& id) { return !is_known(id); });
  const auto under_way = todo_.empty() ? ClusterErasure::Id{} : todo_.front().id;
  todo_.clear();
  for (const ClusterErasure& one : known_) {
    if (!recorded_.contains(one.id)) todo_.push_back(one);
  }
  if (running_ != nullptr) {
    const auto same = std::ranges::find(todo_, under_way, &ClusterErasure::id);
    if (same == todo_.end()) {
      running_ = nullptr;
    } else {
      std::rotate(todo_.begin(), same, same + 1);
    }
  }
  int64_t done = 0;
  for (const ClusterErasure& one : known_) {
    if (!recorded_.contains(one.id)) break;
    done = one.revision;
  }
  directory_.Erased(done);
}

const storage::Erasure::Progress* Eraser::Find(const ClusterErasure::Id& id) const {
  const auto found = progress_.find(id);
  return found == progress_.end() ? nullptr : &found->second;
}

void Eraser::TryLater(const char* what, const absl::Status& why) {
  retry_at_ = clock_.Now() + kEraseAgain;
  if (std::exchange(reported_failure_, true)) return;
  Log(LogLevel::kWarning, what,
      {{"tenant", todo_.front().tenant}, {"by", todo_.front().node}, {"error", std::string(why.message())}});
}

void Eraser::Begin() {
  const ClusterErasure& wish = todo_.front();
  const auto found = std::ranges::find(names_, wish.tenant);
  const bool known = found != names_.end();  // otherwise the disk may have objects of it
  const auto tenant = known ? static_cast<storage::TenantId>(found - names_.begin()) : storage::kNoTenant;
  absl::StatusOr<std::shared_ptr<storage::Erasure>> begun = cache_->upkeep().Erase(tenant, wish.tenant, wish.ns);
  if (!begun.ok()) return TryLater(kCannotYet, begun.status());
  if (known) erase_texts_and_pages_(tenant, wish.ns);
  running_ = *std::move(begun);
}

void Eraser::Tick() {
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
    // It starts again in its next turn: a bad place on the disk does not block others.
    running_ = nullptr;
    std::rotate(todo_.begin(), todo_.begin() + 1, todo_.end());
  }
}

void Eraser::Save() {
  const ClusterErasure::Id id = todo_.front().id;
  if (folder_.empty()) return Record(id);
  std::set<ClusterErasure::Id> ids = recorded_;
  ids.insert(id);
  const auto written = std::make_shared<absl::Status>();
  saving_ = disk_io_->Run(
      storage::kNoTenant, [folder = folder_, ids = std::move(ids), written] { *written = WriteErased(folder, ids); },
      [this, id, written] {
        saving_ = false;
        if (written->ok()) return Record(id);
        if (!todo_.empty()) TryLater("cannot record a completed erasure; it will be repeated", *written);
      });
  if (!saving_) TryLater(kCannotYet, absl::ResourceExhaustedError("the disk's queue is full"));
}

void Eraser::Record(const ClusterErasure::Id& id) {
  recorded_.insert(id);
  reported_failure_ = false;
  const auto done = std::ranges::find(known_, id, &ClusterErasure::id);
  if (done != known_.end()) {
    const storage::Erasure::Progress progress =
        running_ == nullptr ? storage::Erasure::Progress() : running_->progress();
    Log(LogLevel::kInfo, "erasure done",
        {{"tenant", done->tenant},
         {"namespace", done->ns.has_value() ? done->ns->Hex() : ""},
         {"by", done->node},
         {"objects", progress.erased.objects},
         {"bytes", progress.erased.bytes}});
  }
  running_ = nullptr;
  Changed();
}

}  // namespace ashlar::daemon
