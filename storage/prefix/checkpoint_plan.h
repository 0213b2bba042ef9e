// SPDX-License-Identifier: Apache-2.0
// CheckpointPlan: chooses checkpoint depths in a prompt so that prompts that diverge from it recompute the least.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/prefix/overlap_model.h"

namespace ashlar::storage {

// Returns the distance between possible checkpoints near a depth: 2ⁿ · capture_tokens, so that each point of a coarser
// grid is also a point of the finer ones. At most 1/256 of a prompt is computed again because of it. Prompts that
// diverge from a text a few tokens apart thus share one checkpoint and its count of uses. Alternatives gave lower hit
// rates: one grid for all depths, grids that depend on the current price, and merging adjacent checkpoints whose
// distance does not justify a state's bytes.
uint64_t CheckpointGrid(uint64_t depth, uint64_t capture_tokens);

// The exact dynamic program of Sparse Prefix Caching (§4, Theorem 2), for probability masses at some depths, a cost
// that grows with depth (tokens, FLOPs), and checkpoints at multiples of a page. It runs from the end, so that one plan
// serves every depth at which a prompt may resume. With possible checkpoints y_0 < y_1 < …, W_m(j) is the least
// expected cost of the masses from y_j on if there is a checkpoint at y_j and at most m more follow:
//
//   W_0(j) = Σ_{d ≥ y_j} p_d (C(d) − C(y_j)),
//   W_m(j) = min_{i > j} Σ_{y_j ≤ d < y_i} p_d (C(d) − C(y_j)) + W_{m−1}(i).
//
// With P(i) = Σ_{d < y_i} p_d and D(i) = Σ_{d < y_i} p_d C(d), candidate i is the line of slope P(i) and intercept
// D(i) + W_{m−1}(i) at −C(y_j). Slopes fall and −C grows as j falls, so a layer takes one pass over the lower hull.
class CheckpointPlan {
 public:
  // cost of computing that many tokens from the start; strictly increasing
  using Cost = absl::FunctionRef<double(uint64_t depth)>;

  // `model`: where later prompts diverge from one of `tokens` tokens, sorted by depth, fewer than 65,536. At most
  // `most` checkpoints, at multiples of `page`. O(masses · most).
  CheckpointPlan(std::vector<OverlapForecast::Mass> model, uint64_t tokens, uint64_t page, size_t most, Cost cost);

  struct Prompt {
    uint64_t resume = 0;  // it can resume here already
    uint64_t shared = 0;  // it is known up to here, so nothing diverges from it before
    uint64_t tokens = 0;
  };
  // The plan for one prompt. Valid as long as the CheckpointPlan.
  class Placement {
   public:
    size_t most() const;  // the largest number of checkpoints
    // Returns the expected cost that a later prompt recomputes with at most that many checkpoints; non-increasing.
    double Expected(size_t checkpoints) const;
    // Returns their depths, ascending, after `resume`.
    std::vector<uint64_t> Positions(size_t checkpoints) const;

   private:
    friend class CheckpointPlan;
    struct Point {
      uint32_t index = 0;  // in the plan
      uint64_t at = 0;
      double before = 0;  // expected cost of the masses before it
    };
    // Returns the first checkpoint of the best choice; null if none reduces the cost.
    const Point* Best(size_t checkpoints, double& least) const;

    const CheckpointPlan* plan_ = nullptr;
    double none_ = 0;            // expected cost without checkpoints
    std::vector<Point> points_;  // possible checkpoints in the prompt
  };
  // Exact for a prompt of `tokens` tokens. In a prompt of a similar length, masses keep their depth from the start or
  // their distance from the end, and costs after the first checkpoint are those of `tokens`, including masses that are
  // after the end of a shorter prompt. O(masses).
  Placement For(const Prompt& prompt, uint64_t page, Cost cost) const;

  uint64_t bytes() const;  // its memory

 private:
  struct Line {
    double slope, intercept;
    uint16_t to;
    double At(double x) const { return slope * x + intercept; }
  };
  static constexpr uint64_t kNowhere = UINT64_MAX;
  static bool Hidden(const Line& before, const Line& middle, const Line& after);
  size_t points() const { return begin_.size() - 1; }
  double Left(size_t checkpoints, size_t point) const { return left_[checkpoints * points() + point]; }
  uint16_t Next(size_t checkpoints, size_t point) const { return next_[checkpoints * points() + point]; }
  void AddLayer(size_t checkpoints, const std::vector<double>& costs, const std::vector<double>& mass,
                const std::vector<double>& sum);
  // Returns the depth of a mass in a prompt of that many tokens; kNowhere if it is not in the prompt.
  uint64_t DepthIn(uint64_t tokens, const OverlapForecast::Mass& mass) const;

  std::vector<OverlapForecast::Mass> model_;
  uint64_t tokens_;
  size_t most_;
  std::vector<uint32_t> begin_;  // first mass of each possible checkpoint, and the number of masses
  std::vector<double> left_;     // W_m(j), by m and j
  std::vector<uint16_t> next_;   // the best i for W_m(j); j if no more checkpoint helps
};

}  // namespace ashlar::storage
