// SPDX-License-Identifier: Apache-2.0
// Decoding from buffers (KVBuffer §3): the keys and writes of a sequence's last tokens are buffered, and applied to the
// states of its linear layers many tokens at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "examples/refengine/engine.h"
#include "kernels/kernels.h"

namespace ashlar::refengine {

// Buffers of one sequence. As an advancer it decodes one token in each linear layer, in order; TokenDone ends the
// token.
class DecodeBuffers final : public SeamAdvancer {
 public:
  // `model` and `kernels` outlive it.
  DecodeBuffers(const Model& model, const kernels::Kernels& kernels, const DecodeBuffering& buffering);

  const DecodeBuffering& buffering() const { return buffering_; }
  int32_t filled() const { return filled_; }  // tokens that the states do not hold yet

  // The queue of the engine that uses it, until the next call.
  void Use(kernels::Queue& queue) { queue_ = &queue; }
  bool Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) override;
  void TokenDone();
  // Updates the states to the last token.
  void Settle(RecurrentState& states);
  // Call it when the states were changed otherwise, or abandoned.
  void Erase();

 private:
  struct Layer {
    std::vector<std::byte> keys, writes;
    std::vector<float> gates;
    std::vector<std::byte> copies;  // fp16 copies of the states
    std::vector<int32_t> exponents;
    std::vector<void*> copy_heads;
  };
  bool Flushes() const { return filled_ + 1 >= buffering_.capacity; }
  kernels::BufferedRequest RequestOf(Layer& layer, const kernels::StateView& state, bool flush);

  const Model& model_;
  const kernels::Kernels& kernels_;
  const DecodeBuffering buffering_;
  kernels::Queue* queue_ = nullptr;
  std::vector<Layer> layers_;  // linear layers
  int32_t filled_ = 0;
  bool copied_ = false;  // the copies are of the states
};

}  // namespace ashlar::refengine
