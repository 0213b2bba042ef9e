// SPDX-License-Identifier: Apache-2.0
// ChildProcess, for tests: a program that a test starts, suspends and kills.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ashlar::daemon {

struct ChildOptions {
  std::vector<std::string> command;      // the program, searched in PATH, and its arguments
  std::vector<std::string> environment;  // NAME=VALUE, added to this process's environment
  std::string log;                       // file to which its output is appended; empty: this process's output
  int network_namespace = -1;            // descriptor of its network namespace; negative: that of this thread
};

// A child is killed when the thread that started it ends, so that a crashed test leaves none.
class ChildProcess {
 public:
  ChildProcess() = default;
  ~ChildProcess() { Kill(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Start(const ChildOptions& options);  // kills a running one first; failures are test failures
  void Kill();                              // SIGKILL, and waits for the exit
  int Terminate();                          // SIGTERM, and waits; returns like Wait
  int Wait();                               // waits for the exit; returns the exit code, or −1 after a signal
  bool Running();
  void Freeze();                      // SIGSTOP, and waits until it is stopped
  void Thaw();                        // SIGCONT
  pid_t pid() const { return pid_; }  // −1 without a process

 private:
  pid_t pid_ = -1;
};

}  // namespace ashlar::daemon
