// SPDX-License-Identifier: Apache-2.0
// The inner loops of rows.cc, compiled for every vector width and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// kStreaming writes past the caches, so that a target larger than the caches is not read before it is written. Streamed
// stores become visible to other threads by FinishStreaming, on the thread that stored.
enum class Stores : uint8_t { kCached, kStreaming };
void FinishStreaming();

// The rotation of every pair by one number of positions. Angles are computed in fp64: in fp32 their error would be 0.03
// rad at position one million.
struct Turn {
  // `scale`: of the rotated dimensions.
  Turn(const Rotation& rotation, int64_t delta, float scale = 1);

  RopeStyle style;
  int32_t rotary_dim;
  // Half-split: by pair. Interleaved: by dimension, the sine of even dimensions negative.
  alignas(64) float cosine[kMaxRotaryDim];
  alignas(64) float sine[kMaxRotaryDim];
};

// Keys, dense in source and target. In place when they are the same.
struct KeyRows {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int32_t dim = 0;
  const void* source = nullptr;
  void* target = nullptr;
  const float* source_scales = nullptr;  // 8-bit types: [rows], or null
  float* target_scales = nullptr;
};
void TurnRows(const Turn& turn, const KeyRows& keys, Stores stores);

void CopyBytes(const void* source, void* target, size_t bytes, Stores stores);

}  // namespace ashlar::kernels::host
