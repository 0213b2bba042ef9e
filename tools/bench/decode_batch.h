// SPDX-License-Identifier: Apache-2.0
// A batch of requests that decode through several linear layers, as the benchmarks of decoding run it.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "tools/bench/case_memory.h"

namespace ashlar::bench {

// States and buffers of `layers` layers, used in turns so that none of them is in a cache when its turn comes. Every
// slot of the buffers is filled from the start; each call gives the number of slots that count.
class DecodeBatch {
 public:
  struct Options {
    Family family = Family::kGdn;
    int32_t heads = 32, key_heads = 16, dim = 128;
    StateOrder order = StateOrder::kKeyFirst;
    DType state = DType::kF32, buffer = DType::kF16;
    std::optional<DType>
        rounded;  // fp16 or bf16: the type of a state's copy, which is read by tokens that do not flush
    int32_t requests = 32, layers = 8, slots = 64;
    int32_t saved_states = 0;  // space for copies of one layer's states
  };
  explicit DecodeBatch(const Options& options);
  DecodeBatch(const DecodeBatch&) = delete;

  const kernels::LinearShape& shape() const { return shape_; }
  const Options& options() const { return options_; }

  // All layers' states without saved ones, in the order in which layers are used.
  std::span<std::byte> States();

  // Decodes one token of every request in one layer. Recurrent decoding leaves rounded copies as they are.
  void Decode(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer, int32_t filled, bool flush);
  // The same by AdvanceSeam, request by request.
  void Advance(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer);
  // `drafts` tokens of every request at once.
  void Verify(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer, int32_t filled, int32_t drafts);
  // The same one after another, keeping each state separately (copies, and the state itself for the last), request by
  // request: by AdvanceSeam with checkpoints, or by copying and decoding recurrently.
  void AdvanceSaving(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer, int32_t drafts);
  void DecodeSaving(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer, int32_t drafts);
  // Every request's state after `tokens` slots, in place.
  void Rebuild(const kernels::Kernels& kernels, kernels::Queue& queue, int32_t layer, int32_t tokens);

 private:
  struct Heads {
    std::vector<void*> heads;
    std::vector<int32_t> exponents;
  };
  struct Request {
    Heads state, rounded;
    std::vector<int32_t> page_table;
  };

  kernels::StateView StateOf(Request& request) const;
  // None if there is no copy.
  kernels::StateView RoundedOf(Request& request) const;
  kernels::BufferedRequest View(int32_t layer, int32_t request, int32_t filled, bool flush);
  std::vector<kernels::BufferedRequest>& Views(int32_t layer, int32_t filled, bool flush);
  kernels::TokenInputs Inputs(int64_t first, int64_t tokens) const;
  Heads HeadsAt(std::byte* states, DType dtype) const;

  const Options options_;
  kernels::LinearShape shape_;
  Buffer states_{0}, rounded_{0}, keys_{0}, writes_{0};
  std::vector<float> gates_, table_, q_, k_, v_, g_, beta_, out_;
  std::vector<Request> requests_;  // [layers][requests]
  std::vector<Request> saved_;
  std::vector<kernels::BufferedRequest> views_;
};

}  // namespace ashlar::bench
