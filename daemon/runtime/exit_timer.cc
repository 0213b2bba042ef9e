// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/exit_timer.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ashlar::daemon {
namespace {

// Read by the signal handler. Writing this much to a pipe that poll reports as writable does not block.
char last_line[PIPE_BUF];
size_t last_line_bytes = 0;
int exit_status = 0;

void SetTimer(std::chrono::nanoseconds patience) {
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(patience).count();
  const itimerval timer{.it_interval = {}, .it_value = {microseconds / 1'000'000, microseconds % 1'000'000}};
  setitimer(ITIMER_REAL, &timer, nullptr);
}

void End(int) {
  pollfd ready{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT) != 0) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, last_line, last_line_bytes);
  }
  _exit(exit_status);
}

}  // namespace

void ExitTimer::Start(std::chrono::nanoseconds patience, int status, std::string_view line) {
  Cancel();
  last_line_bytes = std::min(line.size(), sizeof last_line);
  std::memcpy(last_line, line.data(), last_line_bytes);
  exit_status = status;
  struct sigaction action {};
  action.sa_handler = End;
  sigfillset(&action.sa_mask);
  sigaction(SIGALRM, &action, nullptr);
  SetTimer(std::max<std::chrono::nanoseconds>(patience, std::chrono::milliseconds(1)));
}

void ExitTimer::Cancel() {
  SetTimer(std::chrono::nanoseconds(0));
}

}  // namespace ashlar::daemon
