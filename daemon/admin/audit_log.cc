// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin/audit_log.h"

#include <fcntl.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/named_thread.h"
#include "kernels/mutex.h"
#include "storage/tier/file_owner.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint32_t kNoLogin = ~uint32_t{0};
constexpr size_t kShownBytes = 8;
constexpr size_t kMostName = 64;
constexpr std::chrono::milliseconds kNoPatience{0};

// Returns the user's name, or its number.
std::string UserName(uid_t uid) {
  passwd entry{};
  passwd* found = nullptr;
  char buffer[4096];
  if (getpwuid_r(uid, &entry, buffer, sizeof buffer, &found) != 0 || found == nullptr) return absl::StrCat(uid);
  return entry.pw_name;
}

void Append(const std::string& name, const std::string& value, std::string& line) {
  absl::StrAppend(&line, line.empty() ? "" : " ", name, "=", value);
}

size_t CountTrue(const Message& message, const FieldDescriptor& field) {
  const auto& reflection = *message.GetReflection();
  const int size = reflection.FieldSize(message, &field);
  size_t count = 0;
  for (int i = 0; i < size; ++i) count += reflection.GetRepeatedBool(message, &field, i) ? 1 : 0;
  return count;
}

void Describe(const std::string& prefix, const Message& message, std::string& line) {
  const auto& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* const field : fields) {
    const std::string name = absl::StrCat(prefix, field->name());
    if (field->is_repeated()) {
      const bool flags = field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL;
      const auto size = static_cast<size_t>(reflection.FieldSize(message, field));
      Append(name, absl::StrCat(flags ? CountTrue(message, *field) : size), line);
      continue;
    }
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Describe(absl::StrCat(name, "."), reflection.GetMessage(message, field), line);
        break;
      case FieldDescriptor::CPPTYPE_STRING: {
        const std::string text = reflection.GetString(message, field);
        const bool raw = field->type() == FieldDescriptor::TYPE_BYTES;
        const size_t shown = raw ? kShownBytes : kMostName;
        const std::string begin = text.substr(0, shown);
        Append(name, absl::StrCat(raw ? absl::BytesToHexString(begin) : begin, text.size() > shown ? "…" : ""), line);
        break;
      }
      case FieldDescriptor::CPPTYPE_BOOL:
        Append(name, "true", line);
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        Append(name, absl::StrCat(reflection.GetDouble(message, field)), line);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        Append(name, absl::StrCat(reflection.GetUInt32(message, field)), line);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        Append(name, absl::StrCat(reflection.GetUInt64(message, field)), line);
        break;
      default:
        break;
    }
  }
}

}  // namespace

Operator OperatorOf(uid_t uid, pid_t pid) {
  Operator by{.uid = uid, .pid = pid};
  std::ifstream file(absl::StrCat("/proc/", pid, "/loginuid"));
  uint32_t login = kNoLogin;
  if (file >> login && login != kNoLogin) by.login_uid = login;
  return by;
}

absl::StatusOr<AuditLog::File> AuditLog::OpenFile(const std::string& path) {
  if (path.empty()) return File();
  File file(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("log.audit_file: ", absl::ErrnoToStatus(errno, path).message()));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("log.audit_file: ", path, " is not a regular file; expected a regular file or no file"));
  }
  if (absl::Status owned = storage::CheckOwner(path, info); !owned.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("log.audit_file: ", owned.message()));
  }
  if ((info.st_mode & 0077) != 0 && fchmod(file.get(), 0600) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("log.audit_file: other users can read ", path, "; expected mode 0600"));
  }
  return file;
}

struct AuditLog::Writer {
  struct Line {
    std::shared_ptr<const File> file;
    std::string text;
  };

  // Failures are logged once, until a line is written or another file is used.
  void Failed(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (std::exchange(failed, true)) return;
    Log(LogLevel::kError, "cannot write the audit file; operators' actions are in the log only", {{"error", why}});
  }
  void Replace(File with) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    file = std::make_shared<const File>(std::move(with));
    failed = false;
  }

  void Run() {
    MutexLock lock(mutex);
    for (;;) {
      while (!stopping && lines.empty()) wake.Wait(mutex);
      if (lines.empty()) return;
      const Line line = std::move(lines.front());
      lines.pop_front();
      lock.Unlock();
      const ssize_t size = write(line.file->get(), line.text.data(), line.text.size());
      const std::string why =
          size < 0 ? std::string(absl::ErrnoToStatus(errno, "write").message()) : "only a part was written";
      lock.Lock();
      ++written;
      if (size == static_cast<ssize_t>(line.text.size())) {
        failed = false;
      } else {
        Failed(why);
      }
      progress.NotifyAll();
    }
  }

  Mutex mutex;
  CondVar wake, progress;
  std::deque<Line> lines ABSL_GUARDED_BY(mutex);
  uint64_t taken ABSL_GUARDED_BY(mutex) = 0;    // lines ever queued
  uint64_t written ABSL_GUARDED_BY(mutex) = 0;  // queued lines whose write has returned
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool failed ABSL_GUARDED_BY(mutex) = false;
  std::shared_ptr<const File> file ABSL_GUARDED_BY(mutex);
  // Former files by thread: the thread that replaced a file still writes its line there.
  std::map<std::thread::id, std::shared_ptr<const File>> left_by ABSL_GUARDED_BY(mutex);
};

AuditLog::AuditLog(File file) : writer_(std::make_shared<Writer>()) {
  writer_->Replace(std::move(file));
  thread_ = NamedThread("audit", [writer = writer_] { writer->Run(); });
}

AuditLog::~AuditLog() {
  MutexLock lock(writer_->mutex);
  writer_->stopping = true;
  writer_->wake.NotifyAll();
  const auto deadline = CondVar::Clock::now() + kPatience;
  while (writer_->written != writer_->taken && writer_->progress.WaitUntil(writer_->mutex, deadline)) continue;
  const bool ends = writer_->written == writer_->taken;
  lock.Unlock();
  ends ? thread_.join() : thread_.detach();
}

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(const std::string& path) {
  absl::StatusOr<File> file = OpenFile(path);
  if (!file.ok()) return file.status();
  return std::unique_ptr<AuditLog>(new AuditLog(*std::move(file)));
}

void AuditLog::Use(File file) {
  MutexLock lock(writer_->mutex);
  writer_->Replace(std::move(file));
}

void AuditLog::MoveTo(File file) {
  MutexLock lock(writer_->mutex);
  writer_->left_by[std::this_thread::get_id()] = writer_->file;
  writer_->Replace(std::move(file));
}

void AuditLog::Write(const Entry& entry) {
  const std::string user = UserName(entry.by.uid);
  LogAudit(entry.action, {{"user", user},
                          {"uid", entry.by.uid},
                          {"pid", entry.by.pid},
                          {"login_uid", entry.by.login_uid},
                          {"request", entry.request},
                          {"outcome", entry.outcome},
                          {"milliseconds", static_cast<int64_t>(entry.seconds * 1000)}});
  nlohmann::ordered_json json = {{"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone())},
                                 {"action", entry.action},
                                 {"user", user},
                                 {"uid", entry.by.uid},
                                 {"pid", entry.by.pid},
                                 {"login_uid", nullptr},
                                 {"request", entry.request},
                                 {"outcome", entry.outcome},
                                 {"seconds", entry.seconds}};
  if (entry.by.login_uid >= 0) json["login_uid"] = entry.by.login_uid;
  const std::string line = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  MutexLock lock(writer_->mutex);
  const auto left = writer_->left_by.extract(std::this_thread::get_id());
  for (const auto& file : {left.empty() ? nullptr : left.mapped(), writer_->file}) {
    if (file == nullptr || !file->valid()) continue;  // not configured
    if (writer_->lines.size() >= kMostWaiting) return writer_->Failed("too many lines wait to be written");
    writer_->lines.push_back({file, line});
    ++writer_->taken;
  }
  writer_->wake.NotifyAll();
  const uint64_t last = writer_->taken;
  // After a failure the file is not waited for.
  const auto deadline = CondVar::Clock::now() + (writer_->failed ? kNoPatience : kPatience);
  while (writer_->written < last && writer_->progress.WaitUntil(writer_->mutex, deadline)) continue;
  if (writer_->written < last) writer_->Failed("a write has not returned in time");
}

std::string Describe(const google::protobuf::Message& message) {
  std::string line;
  Describe("", message, line);
  return line;
}

}  // namespace ashlar::daemon
