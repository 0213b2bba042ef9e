#include "kernels/host/rows_vector.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/rows_vector.cc"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whole cache lines are streamed; what is left at both ends is copied as usual.
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

template <bool kStream, class D>
HWY_INLINE void Put(hn::Vec<D> values, D d, float* to) {
  if constexpr (kStream) {
    hn::Stream(values, d, to);
  } else {
    hn::StoreU(values, d, to);
  }
}

template <bool kStream>
HWY_INLINE void TurnHalfSplit(const Turn& turn, const float* source, float* target) {
  const hn::ScalableTag<float> d;
  const int32_t half = turn.rotary_dim / 2, step = static_cast<int32_t>(hn::Lanes(d));
  int32_t i = 0;
  for (; i + step <= half; i += step) {
    const auto x = hn::LoadU(d, source + i), y = hn::LoadU(d, source + half + i);
    const auto c = hn::Load(d, turn.cosine + i), s = hn::Load(d, turn.sine + i);
    Put<kStream>(hn::NegMulAdd(y, s, hn::Mul(x, c)), d, target + i);
    Put<kStream>(hn::MulAdd(x, s, hn::Mul(y, c)), d, target + half + i);
  }
  for (; i < half; ++i) {
    const float x = source[i], y = source[half + i];
    target[i] = x * turn.cosine[i] - y * turn.sine[i];
    target[half + i] = x * turn.sine[i] + y * turn.cosine[i];
  }
}

template <bool kStream>
HWY_INLINE void TurnInterleaved(const Turn& turn, const float* source, float* target) {
  const hn::ScalableTag<float> d;
  const int32_t step = static_cast<int32_t>(hn::Lanes(d));
  int32_t i = 0;
  for (; step > 1 && i + step <= turn.rotary_dim; i += step) {
    const auto pairs = hn::LoadU(d, source + i);
    const auto c = hn::Load(d, turn.cosine + i), s = hn::Load(d, turn.sine + i);
    Put<kStream>(hn::MulAdd(hn::Reverse2(d, pairs), s, hn::Mul(pairs, c)), d, target + i);
  }
  for (; i < turn.rotary_dim; i += 2) {
    const float x = source[i], y = source[i + 1];
    target[i] = x * turn.cosine[i] + y * turn.sine[i];
    target[i + 1] = y * turn.cosine[i + 1] + x * turn.sine[i + 1];
  }
}

template <bool kStream>
void TurnEach(const Turn& turn, int64_t rows, int32_t dim, const float* source, float* target) {
  const size_t rest_bytes = static_cast<size_t>(dim - turn.rotary_dim) * sizeof(float);
  for (int64_t row = 0; row < rows; ++row, source += dim, target += dim) {
    if (turn.style == RopeStyle::kHalfSplit) {
      TurnHalfSplit<kStream>(turn, source, target);
    } else {
      TurnInterleaved<kStream>(turn, source, target);
    }
    if (source == target || rest_bytes == 0) continue;
    if constexpr (kStream) {
      StreamBytes(source + turn.rotary_dim, target + turn.rotary_dim, rest_bytes);
    } else {
      std::memcpy(target + turn.rotary_dim, source + turn.rotary_dim, rest_bytes);
    }
  }
}

void TurnRows(const Turn& turn, int64_t rows, int32_t dim, const float* source, float* target, Stores stores) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int32_t>(hn::Lanes(d));
  const bool aligned = reinterpret_cast<uintptr_t>(target) % (lanes * sizeof(float)) == 0 && dim % lanes == 0 &&
                       turn.rotary_dim / 2 % lanes == 0;
  if (stores == Stores::kStreaming && aligned) {
    TurnEach<true>(turn, rows, dim, source, target);
  } else {
    TurnEach<false>(turn, rows, dim, source, target);
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

Turn::Turn(const Rotation& rotation, int64_t delta) : style(rotation.style), rotary_dim(rotation.rotary_dim) {
  for (int32_t i = 0; i < rotary_dim / 2; ++i) {
    const double angle = static_cast<double>(delta) * rotation.frequencies[i];
    const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
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

void TurnRows(const Turn& turn, int64_t rows, int32_t dim, const float* source, float* target, Stores stores) {
  HWY_DYNAMIC_DISPATCH(TurnRows)(turn, rows, dim, source, target, stores);
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
