// SPDX-License-Identifier: Apache-2.0
// Engine: computes a sequence along a chain of computed runs and cached interiors. Prefill, isolated prefill, seams and
// decode are all one call (HYPIC §4.3).
//
//   full prefill      one run from position 0
//   isolated prefill  the same on a fresh sequence, with a capture of the interior
//   seams             [checkpoint,] run, interior, run, interior, …, run
//   decode            a run of one token
//
// All runs of a chain pass through each layer as one batch: projections are one matrix product over all of them, the
// linear layers' chain is one AdvanceSeam, attention lets each token see all keys before it, cached or computed. The
// same code, kernels and threads serve every case, so that the comparison with full recompute is fair.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "examples/refengine/model.h"
#include "examples/refengine/sequence.h"
#include "kernels/kernels.h"

namespace ashlar::refengine {

// The cached tuple of one layer after a run of tokens; empty for attention layers.
struct CachedLayer {
  kernels::TupleView tuple;
  const float* conv_tail = nullptr;  // [conv_kernel − 1, conv_channels], at the end of the interior
};

// The next tokens of a sequence, either computed or taken from the cache.
struct Step {
  static Step Compute(std::span<const int32_t> tokens) { return {.tokens = tokens}; }
  // `layers`: one entry per layer of the model. With on_layer, keys, values and tuples must be in the sequence's pages
  // and in `layers` when on_layer returns for their layer; without it, at the call.
  static Step Cached(int64_t count, std::span<const CachedLayer> layers) {
    return {.cached_tokens = count, .cached = layers};
  }
  // The same for a sequence's first `count` tokens, whose states are exact: transitions are not read.
  static Step Checkpoint(int64_t count, std::span<const CachedLayer> layers) {
    return {.cached_tokens = count, .cached = layers, .checkpoint = true};
  }

  std::span<const int32_t> tokens;
  int64_t cached_tokens = 0;
  std::span<const CachedLayer> cached;
  bool checkpoint = false;
  RecurrentState* snapshot = nullptr;  // out: the recurrent state after this step; split a run to get more of them

  int64_t count() const { return cached.empty() ? static_cast<int64_t>(tokens.size()) : cached_tokens; }
};

// The memory for the tuple of one linear layer: dense, head after head.
struct TupleBuffers {
  float* transition = nullptr;  // [value_heads, d_k, d_k]; null: not wanted (a checkpoint has none)
  float* state = nullptr;       // [value_heads, d_k, d_v], from a zero start
  float* conv_tail = nullptr;   // [conv_kernel − 1, conv_channels], at `end`
};

// Tuples of the computed tokens at positions [begin, end), which one run or adjacent runs cover.
struct CaptureRange {
  int64_t begin = 0, end = 0;
  std::span<const TupleBuffers> linear;  // one per linear layer, in order
};

// The memory for one linear layer's inputs, dense rows per token: the recurrence's inputs and the convolution's. Gates
// and betas are not written for layers that have none.
struct SpanRows {
  float* keys = nullptr;         // [tokens][key_channels]
  float* values = nullptr;       // [tokens][value_channels]
  float* gates = nullptr;        // [tokens][value_heads]
  float* betas = nullptr;        // [tokens][value_heads]
  float* conv_inputs = nullptr;  // [tokens][conv_channels]
};

// Records the inputs of computed tokens at positions [begin, begin + tokens); other tokens are ignored.
struct SpanTape {
  int64_t begin = 0, tokens = 0;
  std::span<const SpanRows> linear;  // one per linear layer, in order
};

// The parts of the time, in seconds; Advance adds to them.
enum class Part : uint8_t {
  kEmbedding,
  kNorms,
  kProjections,
  kConvolution,
  kRecurrence,
  kCapture,
  kAttention,
  kMlp,
  kHead
};
inline constexpr int kParts = 9;
const char* Name(Part part);
struct Profile {
  std::array<double, kParts> seconds{};
  double& operator[](Part part) { return seconds[static_cast<size_t>(part)]; }
  double operator[](Part part) const { return seconds[static_cast<size_t>(part)]; }
};

// Advances linear layers in place of the engine's own kernels.
class SeamAdvancer {
 public:
  virtual ~SeamAdvancer() = default;

  // Equivalent to kernels::AdvanceSeam, with the same bits. Interiors are the tuples of steps' `cached[layer]`, by
  // address. Returns false if it failed without writing; Engine::Advance then fails.
  virtual bool Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) = 0;
};

// Further results of one Advance. Everything is optional.
struct AdvanceOptions {
  float* last_logits = nullptr;  // out, [vocabulary]: after the chain's last computed token
  float* all_logits = nullptr;   // out, [computed tokens of the chain, vocabulary]
  std::span<const CaptureRange> captures;
  // Called before the work on each layer (a long chain passes through all layers several times); blocks until that
  // layer's cached keys and values have landed, and its cached tuples have arrived. Returns false if they will not
  // arrive.
  std::function<bool(int32_t layer)> on_layer;
  SeamAdvancer* advancer = nullptr;  // null: the engine's kernels
  const SpanTape* tape = nullptr;    // out: inputs of the linear layers
  Profile* profile = nullptr;
};

// How chains of one computed token pass through the linear layers: like longer ones, or with buffers (KVBuffer), which
// hold the tokens' keys and writes until one token in `capacity` updates the states.
struct DecodeBuffering {
  int32_t capacity = 0;       // at most kernels::kMostCapacity; 1: each token updates the states; 0: no buffers
  DType dtype = DType::kF32;  // type of the buffers: kF32, kF16 or kBF16
  bool copies = false;        // tokens that do not update the states read fp16 copies
};

// The fastest on this machine, by measurement (kernels/decoding_costs.h), for this number of alternating sequences.
// Without `may_round` a layer's outputs and states only have fp32's rounding error (1e-5, relative); with it 4e-4.
DecodeBuffering MeasuredBuffering(const Model& model, const kernels::Kernels& kernels, kernels::Workers& workers,
                                  int32_t sequences, bool may_round);

struct EngineOptions {
  int64_t pass_tokens = 2048;  // computed tokens that go through the layers in one pass; bounds memory
  DecodeBuffering decoding;
};

// One engine serves one thread. `model`, `kernels` and `workers` outlive it.
class Engine {
 public:
  Engine(const Model& model, const kernels::Kernels& kernels, kernels::Workers& workers, EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Model& model() const;

  // Advances `sequence` by `chain`, whose steps are consecutive from sequence.length(). INVALID_ARGUMENT names the
  // field (chain[3].cached: …), RESOURCE_EXHAUSTED: the pool has too few pages; both change nothing. CANCELLED:
  // on_layer or the advancer failed; the sequence must be cleared or rewound. Only the first step of an empty sequence
  // may be a checkpoint. Chains of one token, without snapshots, captures or an advancer, are decoded according to the
  // options' `decoding`; others settle the sequence first.
  absl::Status Advance(Sequence& sequence, std::span<const Step> chain, const AdvanceOptions& options = {});

  // Updates the states of a sequence to its last token. Call it before Sequence::recurrent if buffers are used.
  void Settle(Sequence& sequence);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The token with the greatest logit; the lowest id wins a tie.
int32_t GreedyToken(std::span<const float> logits);

}  // namespace ashlar::refengine
