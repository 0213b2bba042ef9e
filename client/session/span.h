// SPDX-License-Identifier: Apache-2.0
// Buffered spans (KVBuffer §6): the inputs of an engine's linear layers for a text's last tokens. The engine offers
// them with the states at the same position, and gets them back in place if the daemon kept them. To get the state
// after any of these tokens, run the recurrence from the checkpoint before them: no projections, no MLPs.
//
// An engine with kernels runs the recurrence itself: SeamStep{checkpoint}, SeamStep{run of SpanInputs}. An engine
// without kernels copies SpanInputs' rows into its region and gives Model::Advance the same two steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/linear.h"
#include "proto/layout.h"

namespace ashlar {

// Rows of tokens in the daemon's memory, read-only: in units of unit_tokens that need not be neighbours.
struct MappedRows {
  std::vector<const std::byte*> units;
  uint64_t unit_tokens = 0;
  uint64_t row_bytes = 0;
  DType dtype = DType::kF32;

  bool empty() const { return units.empty(); }  // true: the layer's family has no such rows
  const std::byte* Row(uint64_t token) const { return units[token / unit_tokens] + token % unit_tokens * row_bytes; }
};

// The inputs of a span's tokens, in the forms PartForm::kSpanKeys to kSpanConvInputs. Lifetime and validity are the
// same as MappedTuple's: rows of a layer may still be in promotion, and may be read only after a landing's WaitLayers
// that covers the layer, or after the verdict, which covers them.
struct MappedSpan {
  struct Layer {
    MappedRows keys, values, gates, betas, conv_inputs;
  };
  kernels::MemoryKind memory = kernels::MemoryKind::kHost;  // memory of the rows; see MappedTuple::memory
  uint64_t tokens = 0;                                      // tokens of the span that the match uses, from its first
  std::vector<Layer> layers;                                // one per layer of the layout; empty for attention layers
};

// A copy of one layer's inputs for the kernels, fp32. Only for spans in CPU memory.
class SpanInputs {
 public:
  // Copies the inputs of the tokens that the span shares with the match.
  SpanInputs(const LinearLayer& layer, const MappedSpan& span, uint32_t index);

  // The inputs, without queries. Points into this object.
  kernels::TokenInputs inputs() const;
  // Returns the convolution's tail after the last token, in the layer's conv_order and ConvType, from the checkpoint's
  // tail and the tokens' own inputs. Empty if the layer has no convolution.
  std::vector<std::byte> ConvTail(const void* checkpoint) const;

 private:
  std::vector<float> Read(const MappedRows& rows) const;

  const LinearLayer& layer_;
  const MappedSpan::Layer& mapped_;
  const uint64_t tokens_;
  std::vector<float> keys_, values_, gates_, betas_;
};

// A text's last tokens in the engine's memory: rows of a token in the form of PartForm, token after token, in the
// region of the commit. `keys` and `values` have the type in PrefixUse; gates and betas are fp32; convolution inputs
// are in the layer's state_dtype. A pointer is null if the layer's family has no such input.
struct CapturedSpan {
  struct Linear {
    uint32_t layer = 0;
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;
    const float* gates = nullptr;
    const float* betas = nullptr;
    const std::byte* conv_inputs = nullptr;
  };
  uint64_t begin =
      0;  // usually a depth of CommitParts::checkpoints; the span covers the tokens from there to the text's end
  std::vector<Linear> linear;  // every linear layer; empty: no span is offered
};

}  // namespace ashlar
