// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/pid_namespace.h"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ashlar::integration {
namespace {

// Root may; other users only inside a user namespace, if the machine allows those.
pid_t ForkIntoNewNamespace() {
  const long child = ::syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, nullptr, nullptr, nullptr, 0);
  if (child >= 0) return static_cast<pid_t>(child);
  return static_cast<pid_t>(::syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWPID | SIGCHLD, nullptr, nullptr, nullptr, 0));
}

}  // namespace

bool MayMakePidNamespaces() {
  const pid_t child = ForkIntoNewNamespace();
  if (child == 0) ::_exit(0);
  return child > 0 && ::waitpid(child, nullptr, 0) == child;
}

pid_t Fork(bool own_pid_namespace) {
  return own_pid_namespace ? ForkIntoNewNamespace() : ::fork();
}

}  // namespace ashlar::integration
