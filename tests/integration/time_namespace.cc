// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/time_namespace.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ashlar::integration {
namespace {

constexpr int kNewTime = 0x80;  // CLONE_NEWTIME, which not every <sched.h> has

// For child processes created from now on.
bool MakeTimeNamespace(int64_t seconds_ahead) {
  if (::unshare(kNewTime) != 0) return false;
  const int offsets = ::open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC);
  const bool written = ::dprintf(offsets, "monotonic %lld 0", static_cast<long long>(seconds_ahead)) > 0;
  ::close(offsets);
  return written;
}

}  // namespace

bool MayMakeTimeNamespaces() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(MakeTimeNamespace(1) ? 0 : 1);
  int status = 1;
  return child > 0 && ::waitpid(child, &status, 0) == child && status == 0;
}

bool GoOnInTimeNamespace(int64_t seconds_ahead) {
  if (!MakeTimeNamespace(seconds_ahead)) return false;
  const pid_t child = ::fork();
  if (child == 0) return ::prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
  if (child < 0) return false;
  ::waitpid(child, nullptr, 0);
  ::_exit(0);
}

}  // namespace ashlar::integration
