// SPDX-License-Identifier: Apache-2.0
// AdaptTransitions: chooses the forms in which a segment's transitions are published. An engine calls it between
// computing and publishing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/session/client.h"
#include "kernels/device.h"
#include "proto/layout.h"

namespace ashlar {

// One dense linear layer's transitions of a segment.
struct DenseTransitions {
  uint32_t layer = 0;
  const float* computed = nullptr;  // heads × [d_k, d_k], fp32 in the layout's order
  // heads × [d_k]: the product of the tokens' decays if the engine knows it, otherwise null; deltanet has no decay,
  // which counts as known. The rest of the transition has low rank if the segment has few tokens.
  const float* decay = nullptr;
  // Out: memory for all transitions in their stored type, inside the region from which the engine publishes. May equal
  // `computed` if that type is fp32.
  std::byte* stored = nullptr;
};
// Chooses for every head the smallest form with ‖T − T̃‖₂ ≤ epsilon (kernels/adaptive.h) and writes it at the place
// that the returned PublishParts::runs give. epsilon 0: all dense. The object of the segment, of `tokens` tokens, never
// takes more space than in dense form: if it would, the layers with the smallest gain stay dense. `workers` may be
// null.
std::vector<PublishParts::Run> AdaptTransitions(const Layout& layout, uint64_t tokens,
                                                std::span<const DenseTransitions> layers, double epsilon,
                                                kernels::Workers* workers);

}  // namespace ashlar
