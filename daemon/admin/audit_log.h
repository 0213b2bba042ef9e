// SPDX-License-Identifier: Apache-2.0
// AuditLog: who has done what to the daemon, one line an action, in the log and in a file of its own.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"

namespace google::protobuf {
class Message;
}

namespace ashlar::daemon {

// A process that asks something of the daemon, as the kernel names it.
struct Operator {
  uid_t uid = 0;
  pid_t pid = 0;
  int64_t login_uid = -1;  // the user that the session began with, before any sudo; −1: not known
};
// The process at the other end of a connected Unix socket, or that sent a signal.
Operator OperatorOf(uid_t uid, pid_t pid);

// Thread-safe.
class AuditLog {
 public:
  using File = UniqueFd;
  // Opens a file to append to, made with mode 0600; of an empty path: none. INVALID_ARGUMENT names log.audit_file.
  static absl::StatusOr<File> OpenFile(const std::string& path);
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path);

  struct Entry {
    Operator by;
    std::string action;   // the call's name
    std::string request;  // without texts: what was asked for
    std::string outcome;  // "ok" and what came of it, or the error
    double seconds = 0;
  };
  void Write(const Entry& entry);
  // Takes the file anew, which has been moved away under its name.
  void Use(File file);
  // Takes a file of another name. The next line of this thread, which says who had it so, goes to both: whoever reads
  // the old file learns why it ends.
  void MoveTo(File file);

 private:
  explicit AuditLog(File file) : file_(std::move(file)) {}
  bool Append(const File& file, const std::string& line) const;

  std::mutex mutex_;
  File file_;  // guarded by mutex_, as the next two
  // Files that were left, until the thread that left one has written its line there.
  std::map<std::thread::id, File> left_by_;
  bool failed_ = false;  // the last line could not be written
};

// The fields of a request or an answer that are set, in one line: names and numbers as they are, bytes as the beginning
// of their digits, lists by their length, and no text of an engine's.
std::string Describe(const google::protobuf::Message& message);

}  // namespace ashlar::daemon
