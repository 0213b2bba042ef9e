// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/rows/rows_vector.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/host/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/rows/rows_vector.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/host/simd/element-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whole cache lines are streamed; the rest at both ends is copied as usual.
void StreamBytes(const void* source, void* target, size_t bytes) {
  constexpr size_t kLine = 64;
  const auto* from = static_cast<const uint8_t*>(source);
  auto* to = static_cast<uint8_t*>(target);
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  const size_t body_end = head + (bytes - head) / kLine * kLine;
  const hn::CappedTag<uint8_t, kLine> d;
  for (size_t i = head; i < body_end; i += kLine) {
    for (size_t j = 0; j < kLine; j += hn::Lanes(d)) hn::Stream(hn::LoadU(d, from + i + j), d, to + i + j);
  }
  std::memcpy(to + body_end, from + body_end, bytes - body_end);
}

// Calls sink(d, values, index) for all rotated numbers of a key's rotary dimensions, vector by vector and at the end
// one by one. A sink may store its values in place.
template <DType kType, class Sink>
HWY_INLINE void TurnHalfSplit(const Turn& turn, const Stored<kType>* source, Sink sink) {
  const int32_t half = turn.rotary_dim / 2;
  int32_t i = 0;
  const auto turn_pairs = [&](auto d) HWY_ATTR {
    const auto x = LoadElements<kType>(d, source + i), y = LoadElements<kType>(d, source + half + i);
    const auto c = hn::LoadU(d, turn.cosine + i), s = hn::LoadU(d, turn.sine + i);
    sink(d, hn::NegMulAdd(y, s, hn::Mul(x, c)), i);
    sink(d, hn::MulAdd(x, s, hn::Mul(y, c)), half + i);
  };
  const hn::ScalableTag<float> d;
  for (const auto step = static_cast<int32_t>(hn::Lanes(d)); i + step <= half; i += step) turn_pairs(d);
  for (; i < half; ++i) turn_pairs(hn::CappedTag<float, 1>());
}

template <DType kType, class Sink>
HWY_INLINE void TurnInterleaved(const Turn& turn, const Stored<kType>* source, Sink sink) {
  const hn::ScalableTag<float> d;
  int32_t i = 0;
  if constexpr (hn::MaxLanes(d) > 1) {
    for (const auto step = static_cast<int32_t>(hn::Lanes(d)); i + step <= turn.rotary_dim; i += step) {
      const auto pairs = LoadElements<kType>(d, source + i);
      const auto c = hn::LoadU(d, turn.cosine + i), s = hn::LoadU(d, turn.sine + i);
      sink(d, hn::MulAdd(hn::Reverse2(d, pairs), s, hn::Mul(pairs, c)), i);
    }
  }
  for (; i < turn.rotary_dim; i += 2) {
    const hn::CappedTag<float, 1> one;
    const auto x = LoadElements<kType>(one, source + i), y = LoadElements<kType>(one, source + i + 1);
    const auto c = hn::LoadU(one, turn.cosine + i), s = hn::LoadU(one, turn.sine + i + 1);
    sink(one, hn::NegMulAdd(y, s, hn::Mul(x, c)), i);
    sink(one, hn::MulAdd(x, s, hn::Mul(y, c)), i + 1);
  }
}

template <DType kType, class Sink>
HWY_INLINE void TurnRow(const Turn& turn, const Stored<kType>* source, Sink sink) {
  if (turn.style == RopeStyle::kHalfSplit) {
    TurnHalfSplit<kType>(turn, source, sink);
  } else {
    TurnInterleaved<kType>(turn, source, sink);
  }
}

template <DType kType, bool kStream>
void TurnEach(const Turn& turn, const KeyRows& keys) {
  const size_t rest = static_cast<size_t>(keys.dim - turn.rotary_dim) * sizeof(Stored<kType>);
  const auto* source = static_cast<const Stored<kType>*>(keys.source);
  auto* target = static_cast<Stored<kType>*>(keys.target);
  for (int64_t row = 0; row < keys.rows; ++row, source += keys.dim, target += keys.dim) {
    TurnRow<kType>(turn, source, [target](auto d, auto values, int32_t i) HWY_ATTR {
      StoreElements<kType, kStream>(values, d, target + i);
    });
    if (source == target || rest == 0) continue;
    if constexpr (kStream) {
      StreamBytes(source + turn.rotary_dim, target + turn.rotary_dim, rest);
    } else {
      std::memcpy(target + turn.rotary_dim, source + turn.rotary_dim, rest);
    }
  }
}

// The largest magnitude of 8-bit numbers: magnitudes have the order of their bits.
template <DType kType>
float LargestMagnitude(const uint8_t* numbers, int32_t count) {
  const hn::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int32_t>(hn::Lanes(d));
  constexpr uint8_t kMagnitude = 0x7F;
  auto largest = hn::Zero(d);
  int32_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, numbers + i), hn::Set(d, kMagnitude)));
  }
  uint8_t of_lane[hn::MaxLanes(d)];
  hn::StoreU(largest, d, of_lane);
  uint8_t bits = *std::max_element(of_lane, of_lane + lanes);
  for (; i < count; ++i) bits = std::max<uint8_t>(bits, numbers[i] & kMagnitude);
  return ReadElement(kType, &bits, 0);
}

float LargestMagnitude(const float* numbers, int32_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int32_t>(hn::Lanes(d));
  auto largest = hn::Zero(d);
  int32_t i = 0;
  for (; i + lanes <= count; i += lanes) largest = hn::Max(largest, hn::Abs(hn::LoadU(d, numbers + i)));
  float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < count; ++i) most = std::max(most, std::abs(numbers[i]));
  return most;
}

// target ← factor × source, vector by vector and at the end one by one.
template <DType kSource, DType kTarget, bool kStream>
HWY_INLINE void ScaleElements(const Stored<kSource>* source, float factor, int32_t count, Stored<kTarget>* target) {
  const hn::ScalableTag<float> d;
  int32_t i = 0;
  const auto scale = [&](auto tag) HWY_ATTR {
    const auto values = hn::Mul(LoadElements<kSource>(tag, source + i), hn::Set(tag, factor));
    StoreElements<kTarget, kStream>(values, tag, target + i);
  };
  for (const auto lanes = static_cast<int32_t>(hn::Lanes(d)); i + lanes <= count; i += lanes) scale(d);
  for (; i < count; ++i) scale(hn::CappedTag<float, 1>());
}

// Rows with a scale each: the largest magnitude of a rotated row determines its new scale.
template <DType kType, bool kStream>
void TurnScaledEach(const Turn& turn, const KeyRows& keys) {
  const auto* source = static_cast<const Stored<kType>*>(keys.source);
  auto* target = static_cast<Stored<kType>*>(keys.target);
  const int32_t rest = keys.dim - turn.rotary_dim;
  alignas(64) float turned[kMaxRotaryDim];
  for (int64_t row = 0; row < keys.rows; ++row, source += keys.dim, target += keys.dim) {
    TurnRow<kType>(turn, source,
                   [&](auto tag, auto values, int32_t i) HWY_ATTR { hn::StoreU(values, tag, turned + i); });
    const float most =
        std::max(LargestMagnitude(turned, turn.rotary_dim), LargestMagnitude<kType>(source + turn.rotary_dim, rest));
    const float scale = TurnedScale(kType, keys.source_scales[row], most);
    const float factor = keys.source_scales[row] / scale;
    ScaleElements<DType::kF32, kType, kStream>(turned, factor, turn.rotary_dim, target);
    ScaleElements<kType, kType, kStream>(source + turn.rotary_dim, factor, rest, target + turn.rotary_dim);
    keys.target_scales[row] = scale;
  }
}

template <DType kType, bool kStream>
void TurnAs(const Turn& turn, const KeyRows& keys) {
  if constexpr (ElementBytes(kType) == 1) {
    if (keys.source_scales != nullptr) return TurnScaledEach<kType, kStream>(turn, keys);
  }
  TurnEach<kType, kStream>(turn, keys);
}

template <DType kType>
void TurnRowsOf(const Turn& turn, const KeyRows& keys, Stores stores) {
  const hn::ScalableTag<float> d;
  // Only whole lines are streamed: a line that is written partly through the cache and partly past it is written to
  // memory and read back. Pieces shorter than 16 bytes cannot be streamed.
  constexpr size_t kLine = 64;
  if constexpr (hn::MaxLanes(d) * sizeof(Stored<kType>) >= 16) {
    const auto bytes = [](int32_t numbers) { return static_cast<size_t>(numbers) * sizeof(Stored<kType>); };
    const bool whole_lines = reinterpret_cast<uintptr_t>(keys.target) % kLine == 0 && bytes(keys.dim) % kLine == 0 &&
                             bytes(turn.rotary_dim) % kLine == 0 && turn.rotary_dim / 2 % hn::Lanes(d) == 0;
    if (stores == Stores::kStreaming && whole_lines) return TurnAs<kType, true>(turn, keys);
  }
  TurnAs<kType, false>(turn, keys);
}

void TurnRows(const Turn& turn, const KeyRows& keys, Stores stores) {
  switch (keys.dtype) {
    case DType::kF32:
      return TurnRowsOf<DType::kF32>(turn, keys, stores);
    case DType::kF16:
      return TurnRowsOf<DType::kF16>(turn, keys, stores);
    case DType::kBF16:
      return TurnRowsOf<DType::kBF16>(turn, keys, stores);
    case DType::kF8E4M3:
      return TurnRowsOf<DType::kF8E4M3>(turn, keys, stores);
    case DType::kF8E5M2:
      return TurnRowsOf<DType::kF8E5M2>(turn, keys, stores);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::kernels::host {
namespace {

HWY_EXPORT(StreamBytes);
HWY_EXPORT(TurnRows);

}  // namespace

Turn::Turn(const Rotation& rotation, int64_t delta, float scale)
    : style(rotation.style), rotary_dim(rotation.rotary_dim) {
  for (int32_t i = 0; i < rotary_dim / 2; ++i) {
    const double angle = static_cast<double>(delta) * rotation.frequencies[i];
    const auto c = static_cast<float>(scale * std::cos(angle)), s = static_cast<float>(scale * std::sin(angle));
    if (style == RopeStyle::kHalfSplit) {
      cosine[i] = c;
      sine[i] = s;
    } else {
      cosine[2 * i] = cosine[2 * i + 1] = c;
      sine[2 * i] = -s;
      sine[2 * i + 1] = s;
    }
  }
}

void TurnRows(const Turn& turn, const KeyRows& keys, Stores stores) {
  HWY_DYNAMIC_DISPATCH(TurnRows)(turn, keys, stores);
}

void CopyBytes(const void* source, void* target, size_t bytes, Stores stores) {
  if (bytes == 0) return;
  if (stores == Stores::kCached) {
    std::memcpy(target, source, bytes);
  } else {
    HWY_DYNAMIC_DISPATCH(StreamBytes)(source, target, bytes);
  }
}

void FinishStreaming() {
  hwy::FlushStream();
}

}  // namespace ashlar::kernels::host
#endif  // HWY_ONCE
