// SPDX-License-Identifier: Apache-2.0
// AuditLog: logs each operator action on one line, in the log and in an optional file.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// Thread-safe. A thread of its own writes the file, so a disk that hangs delays no caller.
class AuditLog {
 public:
  using File = UniqueFd;
  // Opens or creates a file for appending, with mode 0600. An empty path gives an empty File. INVALID_ARGUMENT names
  // log.audit_file.
  static absl::StatusOr<File> OpenFile(const std::string& path);
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path);
  ~AuditLog();  // leaves a thread behind whose write does not return within kPatience

  struct Entry {
    Operator by;
    std::string action;   // name of the call
    std::string request;  // the request without texts
    std::string outcome;  // "ok" and the result, or the error
    double seconds = 0;
  };
  // The entry is in the file when this returns, or the log says that the file cannot be written.
  void Write(const Entry& entry);
  // Continues in a new file at the same path after log rotation.
  void Use(File file);
  // Switches to a file at another path. The next line of this thread, which records the switch, is written to both
  // files, so that the old file shows why it ends.
  void MoveTo(File file);

  static constexpr std::chrono::milliseconds kPatience{500};  // limit of a write
  static constexpr size_t kMostWaiting = 1024;                // lines; further ones are only in the log

 private:
  struct Writer;
  explicit AuditLog(File file);

  const std::shared_ptr<Writer> writer_;  // shared with its thread
  std::thread thread_;
};

// Returns the set fields of a request or reply on one line: names and numbers as they are, bytes as a short hex prefix,
// lists as their length, and no text of an engine.
std::string Describe(const google::protobuf::Message& message);

}  // namespace ashlar::daemon
