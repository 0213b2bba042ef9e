// SPDX-License-Identifier: Apache-2.0
// CheckpointPlan: where in a prompt to checkpoint, so that prompts that part from it recompute the least.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/prefix/overlap_model.h"

namespace ashlar::storage {

// The exact dynamic program of Sparse Prefix Caching (§4, Theorem 2), for masses at some depths, a cost that grows with
// depth (tokens, FLOPs), and checkpoints at multiples of a page:
//   F_0(j) = Σ_{d < y_j} p_d (C(d) − C(y_0)),   F_m(j) = min_{i < j} F_{m−1}(i) + Σ_{y_i ≤ d < y_j} p_d (C(d) −
//   C(y_i)),
// y_0 the depth that is there already, y_1 < y_2 < … where a checkpoint may be, and the answer is F_M behind the last.
// Candidate i is the line of slope −C(y_i) and intercept F_{m−1}(i) − D(i) + C(y_i) P(i) at P(j) = Σ_{d < y_j} p_d,
// plus D(j) = Σ_{d < y_j} p_d C(d): slopes fall and P grows, so a layer takes one pass over the lower hull.
class CheckpointPlan {
 public:
  using Cost =
      absl::FunctionRef<double(uint64_t depth)>;  // of computing that many tokens from the start; grows strictly

  // `model`: by depth, all behind `begin`, which can be resumed at. At most `most` checkpoints, at multiples of `page`.
  // O(most · masses).
  CheckpointPlan(std::span<const OverlapModel::Mass> model, uint64_t begin, uint64_t page, size_t most, Cost cost);

  size_t most() const { return expected_.size() - 1; }  // that make a difference
  // Returns the FLOPs that an expected request recomputes with so many checkpoints; does not grow.
  double Expected(size_t checkpoints) const { return expected_[checkpoints]; }
  // Returns the depths of the checkpoints, rising.
  std::vector<uint64_t> Positions(size_t checkpoints) const;

 private:
  void AddLayer();

  std::vector<uint64_t> at_;                 // y; the last one stands behind all masses
  std::vector<double> cost_, mass_, sum_;    // C(y), P, D
  std::vector<double> layer_;                // F_m
  std::vector<double> expected_;             // F_m behind the last, by m
  std::vector<std::vector<uint32_t>> from_;  // the i that is best for j, by m − 1
};

}  // namespace ashlar::storage
