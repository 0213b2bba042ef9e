// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ashlar::daemon {
namespace {

[[noreturn]] void Become(const ChildOptions& options) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (!options.log.empty()) {
    const int fd = ::open(options.log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    ::dup2(fd, STDOUT_FILENO);
    ::dup2(fd, STDERR_FILENO);
  }
  if (options.network_namespace >= 0 && ::setns(options.network_namespace, CLONE_NEWNET) != 0) ::_exit(127);
  for (const std::string& variable : options.environment) ::putenv(const_cast<char*>(variable.c_str()));
  std::vector<char*> arguments;
  for (const std::string& argument : options.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  ::dprintf(STDERR_FILENO, "%s: cannot be run: %s\n", arguments[0], std::strerror(errno));
  ::_exit(127);
}

int ExitCode(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

void ChildProcess::Start(const ChildOptions& options) {
  Kill();
  pid_ = ::fork();
  if (pid_ == 0) Become(options);
  ASSERT_GT(pid_, 0) << std::strerror(errno);
}

void ChildProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

int ChildProcess::Terminate() {
  if (pid_ > 0) ::kill(pid_, SIGTERM);
  return Wait();
}

int ChildProcess::Wait() {
  int status = 0;
  if (pid_ <= 0 || ::waitpid(pid_, &status, 0) != pid_) return -1;
  pid_ = -1;
  return ExitCode(status);
}

bool ChildProcess::Running() {
  if (pid_ <= 0) return false;
  if (::waitpid(pid_, nullptr, WNOHANG) == 0) return true;
  pid_ = -1;
  return false;
}

void ChildProcess::Freeze() {
  ASSERT_GT(pid_, 0);
  ASSERT_EQ(::kill(pid_, SIGSTOP), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
  if (WIFSTOPPED(status)) return;
  pid_ = -1;
  FAIL() << "it ended before it could be frozen";
}

void ChildProcess::Thaw() {
  ASSERT_GT(pid_, 0);
  ASSERT_EQ(::kill(pid_, SIGCONT), 0);
}

}  // namespace ashlar::daemon
