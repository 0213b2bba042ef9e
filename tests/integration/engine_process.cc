// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/engine_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/daemon_process.h"
#include "tests/integration/pid_namespace.h"
#include "tests/integration/time_namespace.h"

namespace ashlar::integration {

EngineProcess::EngineProcess(const ClientOptions& daemon, const std::vector<std::string>& arguments,
                             const EngineProcessOptions& options) {
  std::vector<std::string> all = {INTEGRATION_ENGINE, daemon.rpc_socket, daemon.session_socket,
                                  std::to_string(options.uid)};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& argument : all) argv.push_back(argument.data());
  argv.push_back(nullptr);
  int input[2], output[2];
  EXPECT_EQ(::pipe2(input, O_CLOEXEC), 0);
  EXPECT_EQ(::pipe2(output, O_CLOEXEC), 0);
  pid_ = Fork(options.own_pid_namespace);
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (options.clock_ahead_seconds != 0 && !GoOnInTimeNamespace(options.clock_ahead_seconds)) ::_exit(127);
    ::dup2(input[0], STDIN_FILENO);
    ::dup2(output[1], STDOUT_FILENO);
    ::execv(INTEGRATION_ENGINE, argv.data());
    ::_exit(127);
  }
  EXPECT_GT(pid_, 0);
  ::close(input[0]);
  ::close(output[1]);
  input_ = input[1];
  output_ = output[0];
}

EngineProcess::~EngineProcess() {
  Kill();
  ::close(input_);
  ::close(output_);
}

std::string EngineProcess::ReadLine() {
  for (;;) {
    if (const size_t end = unread_.find('\n'); end != std::string::npos) {
      const std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    struct pollfd readable = {.fd = output_, .events = POLLIN, .revents = 0};
    if (::poll(&readable, 1, static_cast<int>(kPatience.count())) <= 0) return "";
    char bytes[1024];
    const ssize_t got = ::read(output_, bytes, sizeof bytes);
    if (got <= 0) return "";
    unread_.append(bytes, got);
  }
}

void EngineProcess::GoOn() {
  EXPECT_EQ(::write(input_, "\n", 1), 1);
}

void EngineProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace ashlar::integration
