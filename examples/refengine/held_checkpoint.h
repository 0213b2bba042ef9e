// SPDX-License-Identifier: Apache-2.0
// SnapshotAt, HeldCheckpoint: recurrent states at depths of a text, as a chain leaves them and as another chain resumes
// from them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/refengine/layer_tables.h"
#include "examples/refengine/sequence.h"

namespace ashlar::refengine {

// The recurrence computes this number of tokens per block, counted from where a run begins or is cut.
inline constexpr int64_t kRecurrenceTokens = 32;

// The state after a text's first `depth` tokens.
struct Snapshot {
  int64_t depth = 0;
  RecurrentState state;
};

// Cuts the runs of `chain`, which begins at position `start`, so that Engine::Advance leaves the state after each of
// `depths` (ascending) in the result; moving the result leaves its elements in place. Depths that the chain does not
// reach, and depths inside cached interiors, are skipped.
//
// Cuts can change bits. The recurrence works in blocks from the begin of a run: a cut at a multiple of
// kRecurrenceTokens after the begin changes nothing; any other cut changes rounding. Matrix products also depend on
// their number of rows: a resumed text has the same bits as an uninterrupted one if both are cut into the same passes.
std::vector<Snapshot> SnapshotAt(int64_t start, std::span<const int64_t> depths, std::vector<Step>& chain);

// A recurrent state in the form that a chain accepts: a checkpoint. Views stay valid while it lives.
class HeldCheckpoint {
 public:
  HeldCheckpoint(const ModelConfig& config, RecurrentState state);
  std::span<const CachedLayer> layers() const { return tables_.layers(); }
  const RecurrentState& state() const { return *state_; }

 private:
  std::unique_ptr<RecurrentState> state_;
  LayerTables tables_;
};

}  // namespace ashlar::refengine
