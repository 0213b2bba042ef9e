// What a model's cached state takes, and what computing it takes.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "storage/prefix_entry.h"

namespace ashlar::replay {

struct Model {
  std::string name;
  storage::PrefixCosts costs;
  double flops_per_second = 0;  // of prefill, for modelled times to first token
};

// marconi-7b | qwen3-next | kimi-linear | ring-mini, or a JSON file with page_tokens, page_bytes, checkpoint_bytes,
// flops_per_token, flops_per_square, flops_per_second. INVALID_ARGUMENT naming the field, NOT_FOUND.
absl::StatusOr<Model> FindModel(const std::string& name);

}  // namespace ashlar::replay
