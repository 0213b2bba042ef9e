// SPDX-License-Identifier: Apache-2.0
// Copies an engine's tensors of linear layers to memory that the daemon can read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/staging.h"
#include "client/session/client.h"

namespace ashlar::engine {

// Limit of strides, in elements: larger than any process's memory, and small enough that a number of bytes does not
// overflow.
inline constexpr int64_t kMostStride = int64_t{1} << 40;

// Sizes of the tensors of one layer with a state; 0: the layer lacks the tensor.
struct TensorBytes {
  explicit TensorBytes(const ashlar::Layer& layer);
  uint64_t staged(bool with_transition) const;  // bytes of all tensors, each aligned

  uint64_t state = 0, exponents = 0, conv_tail = 0;
  uint64_t transition = 0;  // bytes in the layer's own form, as published
};

// kInvalidArgument, naming the field with prefix `field`, unless there is one entry for every layer with a state,
// ascending, with all of the layer's tensors. If `region` is on a GPU, no tensor may be in it.
Status CheckTensors(const ashlar::Layout& layout, const Region& region, std::span<const LinearTensors> linear,
                    bool with_transition, const std::string& field);

// Returns whether all tensors except transitions are dense and inside the region.
bool LieIn(const Region& region, const ashlar::Layout& layout, std::span<const LinearTensors> linear);

// Returns the places of tensors in a region.
std::vector<PublishParts::Linear> InPlace(std::span<const LinearTensors> linear);

// Copies states, exponents and tails densely to `held`, which must have enough space.
std::vector<PublishParts::Linear> Stage(const ashlar::Layout& layout, std::span<const LinearTensors> linear,
                                        Staging::Held& held);

}  // namespace ashlar::engine
