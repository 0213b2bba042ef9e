// An engine in a process of its own (engine_main.cc), that a test can kill.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "client/client.h"

namespace ashlar::integration {

class EngineProcess {
 public:
  // Runs `integration_engine` with these arguments. uid 0: this user.
  EngineProcess(const ClientOptions& daemon, const std::vector<std::string>& arguments, uint32_t uid = 0);
  ~EngineProcess();  // kills it
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  // The next line that it prints; empty when none comes.
  std::string ReadLine();
  void Kill();  // SIGKILL, and waits for its end

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  std::string unread_;
};

}  // namespace ashlar::integration
