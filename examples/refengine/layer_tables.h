// SPDX-License-Identifier: Apache-2.0
// The cached layers of one run together with the tables of heads that they point into.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "examples/refengine/engine.h"

namespace ashlar::refengine {

// Owns the tables, but not what they point to: states, transitions and tails are not moved. Movable; views into it stay
// valid while it lives.
class LayerTables {
 public:
  // All entries empty, to be filled in.
  explicit LayerTables(const ModelConfig& config);
  // A copy of the tables of `layers`, to be changed.
  LayerTables(const ModelConfig& config, std::span<const CachedLayer> layers);
  LayerTables(LayerTables&&) noexcept = default;
  LayerTables& operator=(LayerTables&&) noexcept = default;

  // Sets the position in the prompt at which the run's segment begins: layers that rotate their keys need it.
  void StandAt(int64_t start);

  std::span<kernels::HeadTuple> heads(int32_t layer) { return heads_[layer]; }  // [value_heads]; attention: empty
  CachedLayer& operator[](int32_t layer) { return layers_[layer]; }
  std::span<const CachedLayer> layers() const { return layers_; }

 private:
  std::vector<std::vector<kernels::HeadTuple>> heads_;
  std::vector<CachedLayer> layers_;
};

// Per-head entries of dense [heads, …] arrays in fp32. `transitions` null: a checkpoint, whose state does not depend on
// earlier state.
void PointAt(const LinearConfig& linear, const float* transitions, const float* states,
             std::span<kernels::HeadTuple> heads);

}  // namespace ashlar::refengine
