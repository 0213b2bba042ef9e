// SPDX-License-Identifier: Apache-2.0
// Cuts a chain into passes: slices whose computed tokens go through all layers at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "examples/refengine/engine.h"

namespace ashlar::refengine {

// A step, or the part of a run, in one pass.
struct PassStep {
  std::span<const CachedLayer> cached;  // empty: computed
  bool checkpoint = false;
  int64_t begin = 0, end = 0;          // rows of the pass; empty for a cached step
  RecurrentState* snapshot = nullptr;  // only at the step's end
};

// Adjacent computed tokens between two interiors: the rows of one convolution and one block of queries.
struct TokenRun {
  int64_t begin = 0, end = 0;           // rows of the pass
  int64_t position = 0;                 // position of row `begin`
  std::span<const CachedLayer> before;  // the interior before the run; empty: computed tokens precede it
};

// The part of a capture range in one pass.
struct CapturePart {
  const CaptureRange* range = nullptr;
  int64_t begin = 0, end = 0;        // rows of the pass
  bool first = false, last = false;  // first or last part of the range
};

struct Pass {
  std::vector<int32_t> tokens;     // one per row
  std::vector<int64_t> positions;  // one per row
  std::vector<PassStep> steps;
  std::vector<TokenRun> runs;
  std::vector<CapturePart> captures;
  int64_t end = 0;  // length of the sequence after this pass

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

// Errors of a chain that begins at `start`, by name (see Engine::Advance).
absl::Status CheckChain(const ModelConfig& config, int64_t start, std::span<const Step> chain,
                        const AdvanceOptions& options);

// `start` is the sequence's length, `pass_tokens` the most rows of a pass. The chain has been checked.
std::vector<Pass> CutIntoPasses(int64_t start, std::span<const Step> chain, std::span<const CaptureRange> captures,
                                int64_t pass_tokens);

}  // namespace ashlar::refengine
