// SPDX-License-Identifier: Apache-2.0
// The common fixture of the composition tests: a prompt in sections, stored in every way and assembled again.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "examples/refengine/engine_fixture.h"
#include "examples/refengine/stored_segment.h"

namespace ashlar::refengine {

// Returns whether a mistake shows in a finite result.
inline bool IsVisible(double error, double least) {
  return std::isfinite(error) && error >= least;
}

// A prompt of sections that are each stored alone, assembled from the stored segments.
class CompositionFixture : public EngineFixture {
 protected:
  using EngineFixture::EngineFixture;

  // Sections of different lengths and a query; section 0 is at position 0.
  void MakePrompt(int sections, int64_t least, int64_t most) {
    sections_.clear();
    prompt_.clear();
    for (int i = 0; i < sections; ++i) {
      sections_.push_back(Text(least + random_() % (most - least + 1)));
      prompt_.insert(prompt_.end(), sections_.back().begin(), sections_.back().end());
    }
    query_ = Text(9);
    prompt_.insert(prompt_.end(), query_.begin(), query_.end());
  }

  int64_t Start(size_t section) const {
    int64_t start = 0;
    for (size_t i = 0; i < section; ++i) start += sections_[i].size();
    return start;
  }

  bool HasInterior(size_t section, SeamWidths seams) const {
    return static_cast<int64_t>(sections_[section].size()) > seams.head + seams.tail;
  }

  // Section 0 is stored as a whole, as a checkpoint.
  StoredSegment MakeStored(size_t section, SeamWidths seams) const {
    return StoredSegment(config(), sections_[section].size(), section == 0 ? SeamWidths{} : seams);
  }

  std::vector<StoredSegment> CaptureIsolated(SeamWidths seams) {
    std::vector<StoredSegment> stored;
    for (size_t i = 0; i < sections_.size() && (i == 0 || HasInterior(i, seams)); ++i) {
      stored.push_back(MakeStored(i, seams));
      const absl::Status status = PrefillIsolated(*engine_, pool_, sections_[i], kernels_, *queue_, stored.back());
      EXPECT_TRUE(status.ok()) << status;
    }
    return stored;
  }

  // Cuts tuples, tails, keys and values out of one run over the whole prompt, in context.
  std::vector<StoredSegment> CaptureInContext(SeamWidths seams) {
    std::vector<StoredSegment> stored;
    std::vector<CaptureRange> captures;
    for (size_t i = 0; i < sections_.size(); ++i) {
      if (i > 0 && !HasInterior(i, seams)) break;
      stored.push_back(MakeStored(i, seams));
      captures.push_back(stored.back().Capture(Start(i)));
    }
    Sequence sequence(config(), pool_);
    AdvanceOptions options;
    options.captures = captures;
    const Step step = Step::Compute(prompt_);
    EXPECT_TRUE(engine_->Advance(sequence, {&step, 1}, options).ok());
    for (size_t i = 0; i < stored.size(); ++i) {
      stored[i].GatherRows(model_, sequence, Start(i), kernels_, *queue_);
    }
    return stored;
  }

  struct Composed {
    std::vector<float> logits;
    RecurrentState end;
    std::vector<RecurrentState> behind;  // after each step except the checkpoint
    std::vector<int64_t> positions;      // ends of those steps
    std::vector<bool> landed;            // indexed by step: true for an interior
  };

  // Lands the stored segments and runs the chain: checkpoint, run, interior, run, …, run with the query. Layers of
  // interior i are changed by `change` first.
  template <typename Change>
  Composed RunChain(const std::vector<StoredSegment>& stored, SeamWidths seams, Change&& change, bool doubled = false) {
    Sequence sequence(config(), pool_);
    EXPECT_TRUE(sequence.Reserve(prompt_.size()));
    std::vector<LayerTables> layers;
    for (size_t i = 0; i < stored.size(); ++i) {
      stored[i].LandRows(model_, sequence, Start(i), kernels_, *queue_);
      LayerTables tables(config(), stored[i].layers());
      tables.StandAt(Start(i));
      layers.push_back(change(i, std::move(tables)));
    }

    const std::span<const int32_t> prompt(prompt_);
    // `doubled`: computes the tokens before the end of the checkpoint once more.
    int64_t done = sections_[0].size() - (doubled ? seams.tail : 0);
    std::vector<Step> chain = {Step::Checkpoint(done, layers[0].layers())};
    for (size_t i = 1; i < stored.size(); ++i) {
      const int64_t begin = Start(i) + seams.head, end = begin + stored[i].interior();
      chain.push_back(Step::Compute(prompt.subspan(done, begin - done)));
      chain.push_back(Step::Cached(stored[i].interior(), layers[i].layers()));
      done = end;
    }
    chain.push_back(Step::Compute(prompt.subspan(done)));
    return Finish(sequence, chain);
  }

  Composed Finish(Sequence& sequence, std::vector<Step>& chain) {
    Composed composed;
    composed.behind.resize(chain.size() - 1);
    int64_t position = chain[0].count();
    for (size_t i = 1; i < chain.size(); ++i) {
      chain[i].snapshot = &composed.behind[i - 1];
      composed.positions.push_back(position += chain[i].count());
      composed.landed.push_back(!chain[i].cached.empty());
    }
    composed.logits = Run(sequence, chain);
    composed.end = sequence.recurrent();
    return composed;
  }

  Composed RunChain(const std::vector<StoredSegment>& stored, SeamWidths seams) {
    return RunChain(stored, seams, [](size_t, LayerTables layers) { return layers; });
  }

  // Full recompute, with the states at the same positions.
  Composed Recompute(std::span<const int64_t> positions) {
    Sequence sequence(config(), pool_);
    std::vector<Step> chain;
    int64_t done = 0;
    const std::span<const int32_t> prompt(prompt_);
    chain.push_back(Step::Compute(prompt.first(1)));
    done = 1;
    for (const int64_t position : positions) {
      chain.push_back(Step::Compute(prompt.subspan(done, position - done)));
      done = position;
    }
    return Finish(sequence, chain);
  }

  // The largest error of layer 0's states over heads and over the positions after steps; `only_landed`: only after
  // interiors.
  double Layer0Error(const Composed& actual, const Composed& expected, bool only_landed = true) const {
    const size_t floats = size_t(config().linear.d_k) * config().linear.d_v;
    double worst = 0;
    for (size_t step = 0; step < actual.behind.size(); ++step) {
      if (only_landed && !actual.landed[step]) continue;
      for (int32_t head = 0; head < config().linear.value_heads; ++head) {
        worst = std::max(worst, RelativeError(actual.behind[step].State(0).subspan(head * floats, floats),
                                              expected.behind[step].State(0).subspan(head * floats, floats)));
      }
    }
    return worst;
  }

  std::vector<std::vector<int32_t>> sections_;
  std::vector<int32_t> query_, prompt_;
};

}  // namespace ashlar::refengine
