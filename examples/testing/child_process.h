// SPDX-License-Identifier: Apache-2.0
// Processes that a tool starts: as another user, within limits, and ended with the tool.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::tools {

// Numbers are enough: neither user nor group need a name.
struct ProcessUser {
  uid_t uid = 0;
  gid_t gid = 0;
};

struct SpawnOptions {
  std::optional<ProcessUser> user;             // none: the caller's user; others require root
  std::vector<std::pair<int, rlim_t>> limits;  // RLIMIT_…, both soft and hard
  int input = -1, output = -1, errors = -1;    // descriptors; −1: the caller's own
};

// Starts `program` with these arguments, the first of which is its name. It gets SIGKILL when the calling thread ends.
// Its user needs no permission for the program's folders.
absl::StatusOr<pid_t> Spawn(const std::string& program, const std::vector<std::string>& arguments,
                            const SpawnOptions& options);

// This program, started again in another role, with lines of text to and from it.
class ChildProcess {
 public:
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& arguments,
                                                             std::optional<ProcessUser> user = std::nullopt);
  ~ChildProcess();  // SIGKILL
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // UNAVAILABLE: it has ended.
  absl::Status WriteLine(std::string line);
  // Without the line end. DEADLINE_EXCEEDED: no line arrived in time.
  absl::StatusOr<std::string> ReadLine(std::chrono::milliseconds patience);
  // Readable once there is a line, or the process has ended.
  int descriptor() const { return output_; }

 private:
  ChildProcess() = default;

  pid_t pid_ = -1;
  int input_ = -1, output_ = -1;
  std::string read_;  // bytes that were read after the last line
};

}  // namespace ashlar::tools
