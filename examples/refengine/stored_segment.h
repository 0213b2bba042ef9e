// SPDX-License-Identifier: Apache-2.0
// A segment's cached form held in this process: what the daemon would keep, without the daemon. Serves tests, and the
// comparisons (naive addition, omitted transitions) that measure what composition is worth.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "examples/refengine/layer_tables.h"
#include "kernels/kernels.h"

namespace ashlar::refengine {

// A segment of n tokens has the interior [head, n − tail).
struct SeamWidths {
  int64_t head = 0, tail = 0;
};

// The interior of one segment: tuples and convolution tails of all linear layers, zero-based keys and values of all
// attention layers. Movable; views into it stay valid while it lives.
class StoredSegment {
 public:
  // Memory for a segment of `tokens` tokens, whose interior is stored; head + tail < tokens.
  StoredSegment(const ModelConfig& config, int64_t tokens, SeamWidths seams);
  StoredSegment(StoredSegment&&) noexcept = default;
  StoredSegment& operator=(StoredSegment&&) noexcept = default;

  int64_t tokens() const { return tokens_; }
  SeamWidths seams() const { return seams_; }
  int64_t interior() const { return tokens_ - seams_.head - seams_.tail; }

  // Returns the capture that fills tuples and tails, for a segment whose token 0 is computed at position `start`. If
  // linear layers rotate their keys, only tuples computed at 0 can be used at other positions.
  CaptureRange Capture(int64_t start) const;
  // Copies the interior's keys and values from the pages; token 0 is at `start`, keys become zero-based.
  void GatherRows(const Model& model, const Sequence& sequence, int64_t start, const kernels::Kernels& kernels,
                  kernels::Queue& queue);
  // Writes keys and values into pages of `sequence`, token 0 at `start`. The pages must be reserved.
  void LandRows(const Model& model, Sequence& sequence, int64_t start, const kernels::Kernels& kernels,
                kernels::Queue& queue) const;

  // For Step::Cached: one entry per layer of the model.
  std::span<const CachedLayer> layers() const { return tables_.layers(); }

 private:
  struct Rows {
    std::vector<float> keys, values;  // [units, kUnitTokens, kv_heads, head_dim]
  };
  struct Tuple {
    std::vector<float> transition, state, conv_tail;
  };

  int64_t tokens_;
  SeamWidths seams_;
  std::vector<Tuple> tuples_;          // one per linear layer
  std::vector<TupleBuffers> buffers_;  // point to tuples_
  std::vector<Rows> rows_;             // one per attention layer
  LayerTables tables_;
};

// Prefills `tokens` alone, from zero state and zero tail at position 0, on a fresh sequence of `pool`, and stores the
// interior: cached data depend on neither neighbours nor positions (HYPIC §4.2).
absl::Status PrefillIsolated(Engine& engine, KvPages& pool, std::span<const int32_t> tokens,
                             const kernels::Kernels& kernels, kernels::Queue& queue, StoredSegment& segment);

// Cached layers with every transition replaced: by the identity (naive addition, S = Σ S_i) or by zero (memory cut at
// every interior). For comparisons only.
class ReplacedTransitions {
 public:
  enum class With : uint8_t { kIdentity, kZero };
  ReplacedTransitions(const ModelConfig& config, With with);
  // The tables that it returns point into this object.
  LayerTables operator()(std::span<const CachedLayer> layers) const;

 private:
  ModelConfig config_;
  With with_;
  std::vector<float> identity_;  // [d_k, d_k], the identity transition of one head
};

}  // namespace ashlar::refengine
