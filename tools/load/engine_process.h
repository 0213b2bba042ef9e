// An engine process as the sweep sees it (load.h, RunEngine).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::load {

class EngineProcess {
 public:
  struct Answer {
    uint64_t tokens = 0;    // of the prompt
    double service_ms = 0;  // in the engine
    uint64_t hits = 0, misses = 0;
  };

  // Starts this program anew with these arguments, and returns when it is ready.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> Start(const std::vector<std::string>& arguments);
  ~EngineProcess();  // ends it
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  absl::Status Ask(uint64_t prompt);
  // Readable once an answer, or the end of the process, is there.
  int descriptor() const { return answers_; }
  // Waits for the answer to the last Ask. UNAVAILABLE: the process has ended.
  absl::StatusOr<Answer> Read();

 private:
  EngineProcess() = default;
  absl::StatusOr<std::string> ReadLine();

  pid_t pid_ = -1;
  int questions_ = -1, answers_ = -1;
  std::string read_;  // behind the last line
};

}  // namespace ashlar::load
