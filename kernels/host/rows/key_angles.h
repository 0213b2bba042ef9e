// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of the angles by which consecutive unrotated keys are rotated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/rotation.h"

namespace ashlar::kernels::host {

// For consecutive blocks of `block` keys. Angles are computed in fp64 where a span begins, and advanced from block to
// block in fp64. Inside a block, key j's angles are those of the block's first key plus those of offset j, added by the
// addition theorem in fp32: three roundings, whatever the position.
//
// Tables are indexed by pair if pairs are half-split, and by dimension if they are interleaved, with the sine of even
// dimensions negated. The theorem holds in that form too.
class KeyAngles {
 public:
  void Prepare(const Rotation& rotation, size_t block);
  void MoveTo(int64_t position);  // sets the position of the block's first key
  void NextBlock();

  RopeStyle style() const { return style_; }
  int32_t rotary_dim() const { return rotary_dim_; }
  // The angles of the block's first key, times the rotation's scale; and those of offset j.
  const float* cosine() const { return first_.data(); }
  const float* sine() const { return first_.data() + width_; }
  const float* offset_cosine(size_t j) const { return offsets_.data() + 2 * j * width_; }
  const float* offset_sine(size_t j) const { return offset_cosine(j) + width_; }

 private:
  struct Angle {
    double cosine, sine;
  };
  void Write(size_t pair, Angle angle, float* cosines) const;
  void WriteFirst();

  RopeStyle style_ = RopeStyle::kNone;
  int32_t rotary_dim_ = 0;
  double scale_ = 1;
  size_t width_ = 0;  // entries per table
  std::vector<double> frequencies_;
  std::vector<Angle> angle_, step_;  // indexed by pair: angle of the block's first key; step per block
  std::vector<float> first_, offsets_;
};

}  // namespace ashlar::kernels::host
