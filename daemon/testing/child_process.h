// SPDX-License-Identifier: Apache-2.0
// ChildProcess, for tests: a program that a test starts, freezes and kills.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ashlar::daemon {

struct ChildOptions {
  std::vector<std::string> command;      // the program, looked for in PATH, and its arguments
  std::vector<std::string> environment;  // NAME=VALUE, besides this process's
  std::string log;                       // appends what it says to this file; empty: this process's own
  int network_namespace = -1;            // a descriptor of the one that it runs in; negative: this thread's
};

// A child dies with the thread that started it, so that a test that crashes leaves none behind.
class ChildProcess {
 public:
  ChildProcess() = default;
  ~ChildProcess() { Kill(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Start(const ChildOptions& options);  // one that still runs is killed first; failures are test failures
  void Kill();                              // SIGKILL, and waits for its end
  int Terminate();                          // SIGTERM, and waits; as Wait
  int Wait();                               // for its end; its exit code, -1 where a signal ended it
  bool Running();
  void Freeze();                      // SIGSTOP, and waits until it stands still
  void Thaw();                        // SIGCONT
  pid_t pid() const { return pid_; }  // -1: none

 private:
  pid_t pid_ = -1;
};

}  // namespace ashlar::daemon
