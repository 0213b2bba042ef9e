// SPDX-License-Identifier: Apache-2.0
// Lets the cache advance a request's linear layers, as for an engine without kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "ashlar/engine.h"
#include "examples/refengine/engine.h"

namespace ashlar::rag {

// Converts the steps of Engine::Advance into positions: its chain is the request's plan, cut into passes.
class DaemonAdvancer final : public refengine::SeamAdvancer {
 public:
  // For one Engine::Advance along the request's current plan.
  DaemonAdvancer(engine::Request& request, const refengine::ModelConfig& config);
  bool Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) override;

 private:
  engine::Request& request_;
  std::vector<uint64_t> position_;  // indexed by layer: the end of the advanced positions
};

}  // namespace ashlar::rag
