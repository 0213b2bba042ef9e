// SPDX-License-Identifier: Apache-2.0
// An engine process as the sweep sees it (load.h, RunEngine).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/testing/child_process.h"

namespace ashlar::load {

class EngineProcess {
 public:
  struct Answer {
    uint64_t tokens = 0;    // tokens of the prompt
    double service_ms = 0;  // time in the engine
    uint64_t hits = 0, misses = 0;
  };

  // Starts this program again with these arguments, and returns when it is ready.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> Start(const std::vector<std::string>& arguments);

  absl::Status Ask(uint64_t prompt);
  // Readable once there is an answer, or the process has ended.
  int descriptor() const { return process_->descriptor(); }
  // Waits for the answer to the last Ask. UNAVAILABLE: the process has ended.
  absl::StatusOr<Answer> Read();

 private:
  explicit EngineProcess(std::unique_ptr<tools::ChildProcess> process) : process_(std::move(process)) {}

  const std::unique_ptr<tools::ChildProcess> process_;
};

}  // namespace ashlar::load
