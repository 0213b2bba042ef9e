// SPDX-License-Identifier: Apache-2.0
// AuditLog: logs each operator action on one line, in the log and in an optional file.
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

// The process that requested an action, as the kernel reports it.
struct Operator {
  uid_t uid = 0;
  pid_t pid = 0;
  int64_t login_uid = -1;  // the user that logged in, before any sudo; −1 if unknown
};
// Returns the process at the other end of a connected Unix socket, or the sender of a signal.
Operator OperatorOf(uid_t uid, pid_t pid);

// Thread-safe.
class AuditLog {
 public:
  using File = UniqueFd;
  // Opens or creates a file for appending, with mode 0600. An empty path gives an empty File. INVALID_ARGUMENT names
  // log.audit_file.
  static absl::StatusOr<File> OpenFile(const std::string& path);
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path);

  struct Entry {
    Operator by;
    std::string action;   // name of the call
    std::string request;  // the request without texts
    std::string outcome;  // "ok" and the result, or the error
    double seconds = 0;
  };
  void Write(const Entry& entry);
  // Continues in a new file at the same path after log rotation.
  void Use(File file);
  // Switches to a file at another path. The next line of this thread, which records the switch, is written to both
  // files, so that the old file shows why it ends.
  void MoveTo(File file);

 private:
  explicit AuditLog(File file) : file_(std::move(file)) {}
  bool Append(const File& file, const std::string& line) const;

  std::mutex mutex_;
  File file_;  // guarded by mutex_, like the members below
  // Previous files, kept until the thread that switched has written its line to them.
  std::map<std::thread::id, File> left_by_;
  bool failed_ = false;  // true if the last write failed
};

// Returns the set fields of a request or reply on one line: names and numbers as they are, bytes as a short hex prefix,
// lists as their length, and no text of an engine.
std::string Describe(const google::protobuf::Message& message);

}  // namespace ashlar::daemon
