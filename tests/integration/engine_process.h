// SPDX-License-Identifier: Apache-2.0
// An engine in a process of its own (engine_main.cc), that a test can kill.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "client/session/client.h"

namespace ashlar::integration {

struct EngineProcessOptions {
  uint32_t uid = 0;                 // 0: this user
  bool own_pid_namespace = false;   // only if MayMakePidNamespaces()
  int64_t clock_ahead_seconds = 0;  // only if MayMakeTimeNamespaces()
};

class EngineProcess {
 public:
  // Runs `integration_engine` with these arguments.
  EngineProcess(const ClientOptions& daemon, const std::vector<std::string>& arguments,
                const EngineProcessOptions& options = {});
  ~EngineProcess();  // kills it
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  // Returns its next output line; empty if none arrives.
  std::string ReadLine();
  void GoOn();  // lets it continue to its next step
  void Kill();  // SIGKILL, and waits for the exit

 private:
  pid_t pid_ = -1;
  int input_ = -1, output_ = -1;
  std::string unread_;
};

}  // namespace ashlar::integration
