// The layout of a model whose config.json (Hugging Face) is at hand: what its layers keep, before any engine runs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "proto/layout.h"

namespace ashlar::ctl {

struct LayoutWishes {
  uint32_t page_tokens = 16;
  uint32_t head = 0, tail = 0;  // seam widths
  DType state_dtype = DType::kF32;
};

// Families: attention with keys and values per head (Llama, Qwen, Mistral, Falcon, ...), multi-head latent attention
// (DeepSeek, Kimi), Gated DeltaNet (Qwen3-Next, Qwen3.5), KDA (Kimi-Linear), lightning attention (MiniMax, Ring),
// Mamba2 beside attention (Bamba, Granite 4, Nemotron-H). INVALID_ARGUMENT names the field of the file that is missing,
// makes no sense, or says of a layer what is not known (a window, a recurrence): no layer is guessed to be attention.
// UNIMPLEMENTED names a family that is none of these.
//
// Sizes are the engine's; the numbers inside (decays, rotary frequencies) are placeholders, so the layout names no
// namespace.
absl::StatusOr<Layout> LayoutFromHfConfig(const std::string& json, const LayoutWishes& wishes);

}  // namespace ashlar::ctl
