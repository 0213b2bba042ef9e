// SPDX-License-Identifier: Apache-2.0
// Puts an engine's tensors of linear layers where the daemon can read them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/staging.h"
#include "client/session/client.h"

namespace ashlar::engine {

// In elements: nothing in a process's memory is further apart, and no number of bytes wraps below it.
inline constexpr int64_t kMostStride = int64_t{1} << 40;

// Bytes of the tensors of one layer with a state; 0: it has none.
struct TensorBytes {
  explicit TensorBytes(const ashlar::Layer& layer);
  uint64_t staged(bool with_transition) const;  // bytes of all tensors, each aligned

  uint64_t state = 0, exponents = 0, conv_tail = 0;
  uint64_t transition = 0;  // bytes in the layer's own form, as published
};

// kInvalidArgument, named behind `field`, unless there is one entry for every layer with a state, ascending, with all
// tensors that the layer has, none of which lies in `region` where that is on a GPU.
Status CheckTensors(const ashlar::Layout& layout, const Region& region, std::span<const LinearTensors> linear,
                    bool with_transition, const std::string& field);

// Returns whether all tensors, without transitions, lie in the region, dense.
bool LieIn(const Region& region, const ashlar::Layout& layout, std::span<const LinearTensors> linear);

// Returns the places of tensors in a region.
std::vector<PublishParts::Linear> InPlace(std::span<const LinearTensors> linear);

// Copies states, exponents and tails to `held`, which must have room: dense, whatever they were.
std::vector<PublishParts::Linear> Stage(const ashlar::Layout& layout, std::span<const LinearTensors> linear,
                                        Staging::Held& held);

}  // namespace ashlar::engine
