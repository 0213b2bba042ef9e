// SPDX-License-Identifier: Apache-2.0
// Has the cache advance linear layers of a request, as an engine without kernels would.
#pragma once

#include <cstdint>
#include <vector>

#include "ashlar/engine.h"
#include "examples/refengine/engine.h"

namespace ashlar::rag {

// Says by positions what Engine::Advance says by steps: its chain is the request's plan, cut into passes.
class DaemonAdvancer final : public refengine::SeamAdvancer {
 public:
  // For one Engine::Advance along the plan that the request has now.
  DaemonAdvancer(engine::Request& request, const refengine::ModelConfig& config);
  bool Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) override;

 private:
  engine::Request& request_;
  std::vector<uint64_t> position_;  // by layer: the end of the advanced positions
};

}  // namespace ashlar::rag
