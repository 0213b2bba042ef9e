// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/rows/key_angles.h"

#include <cmath>

namespace ashlar::kernels::host {

void KeyAngles::Prepare(const Rotation& rotation, size_t block) {
  style_ = rotation.style;
  rotary_dim_ = rotation.rotary_dim;
  scale_ = rotation.scale;
  const auto pairs = static_cast<size_t>(rotary_dim_ / 2);
  width_ = style_ == RopeStyle::kHalfSplit ? pairs : 2 * pairs;
  frequencies_.assign(rotation.frequencies, rotation.frequencies + pairs);
  angle_.resize(pairs);
  step_.resize(pairs);
  first_.resize(2 * width_);
  offsets_.resize(2 * width_ * block);
  for (size_t i = 0; i < pairs; ++i) {
    const Angle one = {std::cos(frequencies_[i]), std::sin(frequencies_[i])};
    Angle angle = {1, 0};
    for (size_t j = 0; j < block; ++j) {
      Write(i, angle, offsets_.data() + 2 * j * width_);
      angle = {angle.cosine * one.cosine - angle.sine * one.sine, angle.sine * one.cosine + angle.cosine * one.sine};
    }
    step_[i] = angle;
  }
}

void KeyAngles::MoveTo(int64_t position) {
  for (size_t i = 0; i < angle_.size(); ++i) {
    const double angle = static_cast<double>(position) * frequencies_[i];
    angle_[i] = {std::cos(angle), std::sin(angle)};
  }
  WriteFirst();
}

void KeyAngles::NextBlock() {
  for (size_t i = 0; i < angle_.size(); ++i) {
    const Angle a = angle_[i], b = step_[i];
    angle_[i] = {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
  }
  WriteFirst();
}

void KeyAngles::Write(size_t pair, Angle angle, float* cosines) const {
  float* const sines = cosines + width_;
  const auto c = static_cast<float>(angle.cosine), s = static_cast<float>(angle.sine);
  if (style_ == RopeStyle::kHalfSplit) {
    cosines[pair] = c;
    sines[pair] = s;
  } else {
    cosines[2 * pair] = cosines[2 * pair + 1] = c;
    sines[2 * pair] = -s;
    sines[2 * pair + 1] = s;
  }
}

void KeyAngles::WriteFirst() {
  for (size_t i = 0; i < angle_.size(); ++i) {
    Write(i, {scale_ * angle_[i].cosine, scale_ * angle_[i].sine}, first_.data());
  }
}

}  // namespace ashlar::kernels::host
