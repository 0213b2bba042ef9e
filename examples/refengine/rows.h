// SPDX-License-Identifier: Apache-2.0
// The engine's work on single rows of activations: norms, activations, convolution, rotation, softmax. Vectorized for
// the running CPU (Highway); everything is fp32. Sizes in floats.
#pragma once

#include <cstdint>

namespace ashlar::refengine {

// out = x / rms(x) × weight. `out` may be `x`.
void RmsNorm(const float* x, const float* weight, float epsilon, int64_t n, float* out);

// x ← scale × x / ‖x‖₂.
void L2Normalize(float* x, float scale, int64_t n);

// out = x / rms(x) × weight × SiLU(z). `out` may be `x`.
void GatedRmsNorm(const float* x, const float* z, const float* weight, float epsilon, int64_t n, float* out);

// out = SiLU(gate) × up. `out` may be `gate`.
void SwiGlu(const float* gate, const float* up, int64_t n, float* out);

// x ← scale × x × sigmoid(gate).
void SigmoidGate(float* x, const float* gate, float scale, int64_t n);

// One token of a causal depthwise convolution: out = SiLU(Σ_j weight[j] × inputs[j]), inputs oldest first.
void ConvolveSilu(const float* const* inputs, const float* weight, int32_t kernel, int64_t channels, float* out);

// Rotates x by angles given as cosines and sines: half-split pairs (i, i + pairs).
void RotateHalfSplit(float* x, const float* cosines, const float* sines, int64_t pairs);

// One block of scores of one query, of which the first `visible` of `n` count. Scores become e^{s − max} (zero if not
// visible); `max` and `sum` accumulate over the blocks of the query (begin with −∞ and 0). Returns the factor by which
// results of earlier blocks must be scaled.
float OnlineSoftmax(float* scores, int64_t visible, int64_t n, float& max, float& sum);

// x ← scale × x.
void Scale(float* x, float scale, int64_t n);

}  // namespace ashlar::refengine
