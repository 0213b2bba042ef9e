// SPDX-License-Identifier: Apache-2.0
// Derives the layout of a model from its config.json (Hugging Face), before any engine runs.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "proto/layout.h"

namespace ashlar::ctl {

struct LayoutWishes {
  uint32_t page_tokens = 16;
  uint32_t head = 0, tail = 0;       // seam widths
  std::optional<DType> state_dtype;  // default: mamba_ssm_dtype or mamba_ssm_cache_dtype, otherwise fp32
};

struct HfLayout {
  Layout layout;
  // Layers whose state is only the last inputs of a short convolution. They are among the layout's linear layers, as
  // the adapters declare them, with the convolution's inputs as the state.
  std::vector<bool> convolution;  // one per layer of the layout
};

// Families: attention with keys and values per head (Llama, Qwen, Mistral, Falcon, ...), multi-head latent attention
// (DeepSeek, Kimi), Gated DeltaNet (Qwen3-Next, Qwen3.5, Olmo-Hybrid), KDA (Kimi-Linear, Ling 3), lightning attention
// (MiniMax, Ring), Mamba-2 beside attention (Bamba, Granite 4, Nemotron-H, Zamba2, Falcon-H1), Mamba (Jamba), short
// convolutions (LFM2). The text model is searched in the file itself and in the fields of multimodal models.
// INVALID_ARGUMENT names a field that is missing, invalid, contradicts another one, or is unknown and may change what a
// layer stores: no layer is assumed to be attention.
//
// Sizes are the engine's; the numbers inside (decays, rotary frequencies) are placeholders, so the layout names no
// namespace.
absl::StatusOr<HfLayout> LayoutFromHfConfig(const nlohmann::json& file, const LayoutWishes& wishes);

}  // namespace ashlar::ctl
