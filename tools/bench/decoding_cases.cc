// SPDX-License-Identifier: Apache-2.0
// Decoding from token buffers: a batch of requests in one layer at a time.
#include <array>
#include <memory>

#include "kernels/decoding_choice.h"
#include "tools/bench/decode_batch.h"
#include "tools/bench/kernel_cases.h"

namespace ashlar::bench {
namespace {

using kernels::DecodeBytes;
using kernels::Kernels;
using kernels::Queue;

// Layers are used in turns: with fewer, the states of one call would still be in a cache at the next call.
constexpr int32_t kLayers = 8;
constexpr int32_t kFilled = 9, kDrafts = 4;  // half of the best buffer

using Call = void (*)(DecodeBatch&, const Kernels&, Queue&, int32_t layer);

struct DecodeOp {
  const char* op;
  const char* text;
  Call call;
  double states, slots;  // moved by a call, of one request
  double tokens;         // tokens of one request
  double terms;          // multiply-adds per number of its states
};

// Returns how often a state is read: a family that erases reads it for keys and for queries.
double Reads(Family family) {
  return Erases(family) ? 2 : 1;
}

const std::array kOps = {
    DecodeOp{"DecodeBuffered", "9 slots",
             [](DecodeBatch& b, const Kernels& k, Queue& q, int32_t l) { b.Decode(k, q, l, kFilled, false); }, 1,
             kFilled + 1, 1, 0},
    DecodeOp{"DecodeBuffered", "9 slots, flush",
             [](DecodeBatch& b, const Kernels& k, Queue& q, int32_t l) { b.Decode(k, q, l, kFilled, true); }, 2,
             kFilled, 1, kFilled + 2},
    DecodeOp{"DecodeBuffered", "no slot, flush (recurrent)",
             [](DecodeBatch& b, const Kernels& k, Queue& q, int32_t l) { b.Decode(k, q, l, 0, true); }, 2, 0, 1, 2},
    DecodeOp{"VerifyDrafts", "4 drafts, 9 slots",
             [](DecodeBatch& b, const Kernels& k, Queue& q, int32_t l) { b.Verify(k, q, l, kFilled, kDrafts); }, 1,
             kFilled + kDrafts, kDrafts, 0},
    DecodeOp{"RebuildState", "9 slots",
             [](DecodeBatch& b, const Kernels& k, Queue& q, int32_t l) { b.Rebuild(k, q, l, kFilled); }, 2, kFilled, 0,
             kFilled + 1},
};

KernelCase Case(const DecodeOp& op, Family family, const char* family_name, DType state, const char* state_name,
                bool quick) {
  const DecodeBatch::Options options{.family = family,
                                     .state = state,
                                     .requests = quick ? 2 : 32,
                                     .layers = quick ? 1 : kLayers,
                                     .slots = kFilled + kDrafts};
  const kernels::LinearShape shape{
      .family = family, .heads = options.heads, .key_heads = options.key_heads, .d_k = options.dim, .d_v = options.dim};
  const DecodeBytes bytes = kernels::DecodeBytesOf(shape, state, options.buffer);
  const double numbers = double{1} * options.requests * options.heads * options.dim * options.dim;
  return {.op = op.op,
          .family = family_name,
          .dtype = state_name,
          .shape = "batch " + std::to_string(options.requests) + ", heads 32/16, 128x128, fp16, " + op.text,
          .bytes = options.requests * (op.states * bytes.state + op.slots * bytes.slot),
          .flops = 2 * numbers * (Reads(family) * op.tokens + op.terms),
          .prepare = [options, call = op.call](const Kernels& kernels, Queue& queue) -> std::function<void()> {
            auto batch = std::make_shared<DecodeBatch>(options);
            return [batch, call, &kernels, &queue, layer = int32_t{0}]() mutable {
              call(*batch, kernels, queue, layer);
              layer = (layer + 1) % batch->options().layers;
            };
          }};
}

}  // namespace

std::vector<KernelCase> DecodingCases(bool quick) {
  std::vector<KernelCase> cases;
  for (const DecodeOp& op : kOps) {
    cases.push_back(Case(op, Family::kGdn, "gdn", DType::kF32, "fp32", quick));
    cases.push_back(Case(op, Family::kGdn, "gdn", DType::kF16, "fp16", quick));
    cases.push_back(Case(op, Family::kGdn, "gdn", DType::kBF16, "bf16", quick));
  }
  constexpr std::array kOthers = {std::pair(Family::kRetnet, "retnet"),     std::pair(Family::kLightning, "lightning"),
                                  std::pair(Family::kMamba2, "mamba2"),     std::pair(Family::kGla, "gla"),
                                  std::pair(Family::kDeltanet, "deltanet"), std::pair(Family::kKda, "kda")};
  for (const auto& [family, name] : kOthers) cases.push_back(Case(kOps[0], family, name, DType::kF32, "fp32", quick));
  return cases;
}

}  // namespace ashlar::bench
