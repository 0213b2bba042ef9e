// Recurrent states at depths of a text: how a chain gives them, and how one takes up again where they were.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/refengine/layer_tables.h"
#include "examples/refengine/sequence.h"

namespace ashlar::refengine {

// The recurrence computes so many tokens at once, counted from where a run begins or is cut.
inline constexpr int64_t kRecurrenceTokens = 32;

// The state behind a text's first `depth` tokens.
struct Snapshot {
  int64_t depth = 0;
  RecurrentState state;
};

// Cuts the runs of `chain`, which begins at position `start`, so that Engine::Advance leaves the state behind each of
// `depths`, which rise, in what is returned; moving that leaves its elements in place. Left out: depths that the chain
// does not reach, and those inside of what is cached.
//
// What changes bits: the recurrence goes in blocks from where a run begins, so a cut changes none if it lies a multiple
// of kRecurrenceTokens behind that, and otherwise rounding. And matrix products depend on how many rows they have, so a
// text that is resumed has the bits of one that was never left if it is cut into the same passes: always where that
// one stopped there, too, and where a pass ended anyhow.
std::vector<Snapshot> SnapshotAt(int64_t start, std::span<const int64_t> depths, std::vector<Step>& chain);

// A recurrent state in the form in which a chain takes it up: a checkpoint. Views stay valid while it lives.
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
