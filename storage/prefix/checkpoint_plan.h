// SPDX-License-Identifier: Apache-2.0
// CheckpointPlan: chooses checkpoint depths in a prompt so that prompts that diverge from it recompute the least.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/prefix/overlap_model.h"

namespace ashlar::storage {

// The exact dynamic program of Sparse Prefix Caching (§4, Theorem 2), for probability masses at some depths, a cost
// that grows with depth (tokens, FLOPs), and checkpoints at multiples of a page:
//
//   F_0(j) = Σ_{d < y_j} p_d (C(d) − C(y_0)),
//   F_m(j) = min_{i < j} F_{m−1}(i) + Σ_{y_i ≤ d < y_j} p_d (C(d) − C(y_i)),
//
// where y_0 is the existing depth, y_1 < y_2 < … are the possible checkpoints, and the result is F_M after the last
// one. Candidate i is the line of slope −C(y_i) and intercept F_{m−1}(i) − D(i) + C(y_i) P(i) at P(j) = Σ_{d < y_j}
// p_d, plus D(j) = Σ_{d < y_j} p_d C(d). Slopes fall and P grows, so a layer takes one pass over the lower hull.
class CheckpointPlan {
 public:
  using Cost =
      // cost of computing that many tokens from the start; strictly increasing
      absl::FunctionRef<double(uint64_t depth)>;

  // `model` is sorted by depth, all after `begin`, where the prompt can resume already. At most `most` checkpoints at
  // multiples of `page`. O(masses).
  CheckpointPlan(std::span<const OverlapForecast::Mass> model, uint64_t begin, uint64_t page, size_t most, Cost cost);

  size_t most() const { return most_; }  // number of checkpoints that reduce the cost
  // Returns the expected FLOPs that a request recomputes with at most that many checkpoints, up to most();
  // non-increasing. O(masses) for each number of checkpoints that no call has needed yet.
  double Expected(size_t checkpoints);
  // Returns the depths of the checkpoints, ascending; beyond most(), those of most().
  std::vector<uint64_t> Positions(size_t checkpoints);

 private:
  struct Line {
    double slope, intercept;
    uint32_t from;
    double At(double x) const { return slope * x + intercept; }
  };
  static bool Hidden(const Line& before, const Line& middle, const Line& after);
  void AddLayer();

  size_t most_;
  std::vector<uint64_t> at_;                 // y; the last one is after all masses
  std::vector<double> cost_, mass_, sum_;    // C(y), P, D
  std::vector<double> layer_;                // F_m
  std::vector<double> expected_;             // F_m after the last, by m, as far as needed
  std::vector<std::vector<uint32_t>> from_;  // the best i for j, by m − 1
  std::vector<double> next_;                 // F_{m+1} while it is computed
  std::vector<Line> hull_;
};

}  // namespace ashlar::storage
