// SPDX-License-Identifier: Apache-2.0
// The bytes of a model's cached state, and the FLOPs of computing it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::replay {

struct Model {
  std::string name;
  storage::PrefixCosts costs;
  uint64_t transition_bytes = 0;     // dense transitions of a segment's tuple, in addition to its states
  double flops_per_second = 0;       // FLOP/s of prefill, for modelled times
  double link_bytes_per_second = 0;  // bandwidth between the store of segments and the engine
};

// marconi-7b | qwen3-next | kimi-linear | ring-mini, or a JSON file with page_tokens, page_bytes, checkpoint_bytes,
// transition_bytes, flops_per_token, flops_per_square, flops_per_second, link_bytes_per_second. INVALID_ARGUMENT naming
// the field, NOT_FOUND.
absl::StatusOr<Model> FindModel(const std::string& name);

}  // namespace ashlar::replay
