// SPDX-License-Identifier: Apache-2.0
// NodeProbe: how much of a prompt a node has cached, and how busy it is.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ashlar {

// The model of a probe. Each field may be empty if the other is unique among the models that the tenant's engines have
// open.
struct ProbedModel {
  std::string ns;  // bytes of its namespace, or the first ones
  std::string model_id;
};

// Estimates of one node; the fields are those of v1::NodeProbe.
struct NodeProbe {
  static constexpr size_t kTiers = 8;
  std::string node;  // empty outside a cluster
  uint64_t prompt_tokens = 0, prefix_tokens = 0, segment_tokens = 0;
  std::array<uint64_t, kTiers> tier_tokens{};  // indexed by TierKind
  std::chrono::nanoseconds fetch{0}, compute{0}, wait{0};
  uint64_t queued_tokens = 0;
  double tokens_per_second = 0;
  uint32_t sessions = 0, landings = 0;
  bool draining = false;
};

}  // namespace ashlar
