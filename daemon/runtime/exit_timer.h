// SPDX-License-Identifier: Apache-2.0
// ExitTimer: ends the process when its stop takes too long, whatever its threads wait for.
#pragma once

#include <chrono>
#include <string_view>

namespace ashlar::daemon {

// One timer for the process (SIGALRM). Not thread-safe.
class ExitTimer {
 public:
  // Ends the process with `status` after `patience`, unless Cancel comes first; destructors and atexit do not run.
  // Before that, writes `line` to stderr if that does not block. A second call replaces the first.
  static void Start(std::chrono::nanoseconds patience, int status, std::string_view line);
  static void Cancel();
};

}  // namespace ashlar::daemon
