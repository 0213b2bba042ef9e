// SPDX-License-Identifier: Apache-2.0
// The kind of each layer of a Hugging Face configuration.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/ashlarctl/hf_fields.h"

namespace ashlar::ctl {

enum class LayerKind {
  kAttention,
  kLinear,       // a recurrence
  kBoth,         // attention and a recurrence
  kConvolution,  // only the last inputs of a short convolution
  kNothing,      // stores nothing per token: an MLP
};

struct LayerKinds {
  std::vector<LayerKind> of_layers;
  bool said = false;     // true: a field names the kinds; false: all layers are treated as attention
  bool windows = false;  // true: a field names layers with windows

  bool Any(LayerKind kind) const;
};

// Refuses a missing count, lists without one entry per layer, unknown words, and fields that contradict each other.
LayerKinds ReadLayerKinds(HfFields& fields);

}  // namespace ashlar::ctl
