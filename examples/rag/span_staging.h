// SPDX-License-Identifier: Apache-2.0
// Records the inputs of the linear layers for a text's last tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "ashlar/engine.h"
#include "examples/refengine/engine.h"

namespace ashlar::rag {

class SpanStaging {
 public:
  SpanStaging(const refengine::ModelConfig& config, uint64_t tokens);
  SpanStaging(const SpanStaging&) = delete;
  SpanStaging& operator=(const SpanStaging&) = delete;

  // From now on the engine records what it computes starting at `begin`.
  void Begin(uint64_t begin) { tape_.begin = static_cast<int64_t>(begin); }
  const refengine::SpanTape& tape() const { return tape_; }
  // The recorded tokens' rows, one set per linear layer.
  const std::vector<engine::SpanRows>& rows() const { return recorded_; }

 private:
  std::vector<std::vector<float>> memory_;
  std::vector<refengine::SpanRows> rows_;
  std::vector<engine::SpanRows> recorded_;
  refengine::SpanTape tape_;
};

}  // namespace ashlar::rag
