// SPDX-License-Identifier: Apache-2.0
// Buffered spans (KVBuffer §6): the inputs of an engine's linear layers for a text's last tokens. The engine offers
// them beside the states there, and gets them back in place if the daemon kept them. The state behind any of these
// tokens is the state of the checkpoint before them, run through the recurrence: no projections, no MLPs.
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

// The inputs of a span's tokens, as PartForm::kSpanKeys to kSpanConvInputs say. Life and validity are those of
// MappedTuple: rows of a layer may be on their way up, and are read only behind a landing's WaitLayers that covers it,
// or behind the verdict, which vouches for them.
struct MappedSpan {
  struct Layer {
    MappedRows keys, values, gates, betas, conv_inputs;
  };
  kernels::MemoryKind memory = kernels::MemoryKind::kHost;  // of the rows, as MappedTuple::memory
  uint64_t tokens = 0;                                      // tokens of the span that the match uses, from its first
  std::vector<Layer> layers;                                // one per layer of the layout; empty for attention layers
};

// A copy of one layer's inputs for the kernels, fp32. Of spans in the processor's memory.
class SpanInputs {
 public:
  // Copies the inputs of the tokens that the span shares with the match.
  SpanInputs(const LinearLayer& layer, const MappedSpan& span, uint32_t index);

  // The inputs, without queries. Points into this object.
  kernels::TokenInputs inputs() const;
  // Returns the convolution's tail behind the last token, in the layer's conv_order and ConvType,
  // made from the checkpoint's tail and the tokens' own inputs. Empty if the layer has no convolution.
  std::vector<std::byte> ConvTail(const void* checkpoint) const;

 private:
  std::vector<float> Read(const MappedRows& rows) const;

  const LinearLayer& layer_;
  const MappedSpan::Layer& mapped_;
  const uint64_t tokens_;
  std::vector<float> keys_, values_, gates_, betas_;
};

// A text's last tokens in the engine's memory: rows of a token as PartForm says, one token behind the other, in the
// region of the commit. `keys` and `values` have the type that PrefixUse names; gates and betas are fp32; convolution
// inputs are in the layer's state_dtype. A pointer is null if the layer's family has no such input.
struct CapturedSpan {
  struct Linear {
    uint32_t layer = 0;
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;
    const float* gates = nullptr;
    const float* betas = nullptr;
    const std::byte* conv_inputs = nullptr;
  };
  uint64_t begin = 0;  // mostly a depth of CommitParts::checkpoints; the span reaches from there to the text's end
  std::vector<Linear> linear;  // every linear layer; none: no span is offered
};

}  // namespace ashlar
