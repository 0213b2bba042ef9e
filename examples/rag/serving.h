// SPDX-License-Identifier: Apache-2.0
// The common part of all ways of serving a prompt, and their result.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <vector>

#include "examples/rag/prompt.h"
#include "examples/refengine/engine.h"
#include "kernels/kernels.h"
#include "proto/outcome.h"

namespace ashlar::rag {

// One engine and its resources. All of it must outlive the ways of serving that use it.
struct Runtime {
  const refengine::Model& model;
  refengine::Engine& engine;
  const kernels::Kernels& kernels;
  kernels::Queue& queue;  // runs copies outside the engine
  kernels::Workers& workers;
};

struct Served {
  double ttft_ms = 0;         // time from the tokens' arrival to the first token's logits
  std::vector<float> logits;  // logits of the first token
  uint64_t computed_tokens = 0;
  uint64_t hits = 0, misses = 0;           // segments
  std::map<TierKind, uint64_t> hit_tiers;  // hits by tier
  std::map<MissReason, uint64_t> miss_reasons;
  double flops = 0;  // FLOPs of the last chain, without filled segments
};

class Stopwatch {
 public:
  double Milliseconds() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace ashlar::rag
