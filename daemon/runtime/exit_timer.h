// SPDX-License-Identifier: Apache-2.0
// ExitTimer: ends the process if its stop takes too long, even if its threads hang.
#pragma once

#include <chrono>
#include <string_view>

namespace ashlar::daemon {

// The process has one timer (SIGALRM). Not thread-safe.
class ExitTimer {
 public:
  // Ends the process with `status` after `patience`, unless Cancel comes first; destructors and atexit handlers do not
  // run. Writes `line` to stderr before that if it does not block. A second call replaces the first.
  static void Start(std::chrono::nanoseconds patience, int status, std::string_view line);
  static void Cancel();
};

}  // namespace ashlar::daemon
