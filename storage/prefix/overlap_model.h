// SPDX-License-Identifier: Apache-2.0
// OverlapModel: learns where prompts diverge from earlier ones. OverlapForecast: its prediction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ashlar::storage {

// The distribution of divergence points as an OverlapModel knew it at one time.
class OverlapForecast {
 public:
  struct Mass {
    uint64_t depth = 0;
    double weight = 0;
    bool from_end = false;  // keeps its distance from the end in a longer prompt; otherwise its depth
  };
  // The distribution of the depth in [1, length] at which a later prompt will diverge from one of `length` tokens, by
  // depth. The weights add up to the probability of that, at most one. A depth has one mass per histogram, and those of
  // a guess.
  std::vector<Mass> Within(uint64_t length) const;

 private:
  friend class OverlapModel;
  struct Piece {
    uint64_t at = 0;  // depth from the start, or distance from the end
    double weight = 0;
  };
  std::vector<Piece> from_start_, from_end_;  // sorted by place; all weights add up to one
};

// Histograms of divergence points, with more weight on recent requests: by depth from the start (instructions of one
// length, followed by something else), and by distance from the end (a document of any length, followed by a short
// question). The two are mixed in proportion to how well they predicted recent requests. (Sparse Prefix Caching §4.2
// has the first one.)
class OverlapModel {
 public:
  static constexpr size_t kMostDepths = 4096;  // per histogram; beyond that, the lightest are dropped

  // A request shared `depth` tokens with an earlier one whose prompt had `length` tokens. `depth` may exceed `length`
  // if decoded tokens were shared.
  void Observe(uint64_t depth, uint64_t length);

  // Each histogram is divided into ranges of neighbouring places that have at most 1/`parts` of its weight, or one
  // place. A range counts at the place where a checkpoint serves all of it, so savings are underestimated by less than
  // its width. At most 2 · `parts` masses per histogram; by default, all places are exact. O(places).
  // `guess`: one more divergence counts as observed, equally likely in every doubling of the depth and of the distance
  // from the end. Without any observation, the forecast is empty all the same.
  OverlapForecast Forecast(size_t parts = SIZE_MAX, bool guess = false) const;

 private:
  static constexpr double kDecay = 1.0 / 4096;
  static constexpr uint64_t kNear = 16;       // tokens within which a prediction counts as correct
  static constexpr size_t kDoublings = 20;    // a guess covers depths and distances up to 2^19 tokens
  static constexpr double kForesight = 0.98;  // decay of the weight of earlier predictions, per request

  using Piece = OverlapForecast::Piece;
  class Histogram {
   public:
    void Add(uint64_t at);
    double Share(uint64_t first, uint64_t last) const;  // share of the total weight
    double total() const { return total_; }
    const std::vector<Piece>& pieces() const { return pieces_; }

   private:
    void Prune();
    std::vector<Piece> pieces_;    // sorted by place
    double total_ = 0, unit_ = 1;  // weight of one request; grows, so that no entry needs decaying
  };

  Histogram from_start_, from_end_;
  double start_foresight_ = 0, end_foresight_ = 0;  // log-likelihood
  uint64_t observed_ = 0;
};

}  // namespace ashlar::storage
