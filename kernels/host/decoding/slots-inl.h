// SPDX-License-Identifier: Apache-2.0
// One head's slots of a token buffer, and its new tokens, as vectors that meet a state: decayed to one position, so
// that products with them need no decay any more. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_SLOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_SLOTS_INL_H_
#undef ASHLAR_KERNELS_HOST_SLOTS_INL_H_
#else
#define ASHLAR_KERNELS_HOST_SLOTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "kernels/decoding.h"
#include "kernels/host/decoding/products-inl.h"
#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// Slots that are held as fp32 at a time; longer buffers (contexts without a state) take several rounds.
constexpr int32_t kSlotBlock = 64;

// to[i] ← from[i] × factors[i], whole vectors; in place if they are the same.
HWY_INLINE void Multiply(const float* from, const float* factors, size_t count, float* to) {
  const Tag d;
  for (size_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, from + i), hn::LoadU(d, factors + i)), d, to + i);
  }
}

// The time of reading a slot, in reads of a state's row.
constexpr size_t kStepsOfSlot = 8;

// One head of one request's buffer.
class HeadSlots {
 public:
  HeadSlots(const LinearShape& shape, const TokenBuffer& buffer, int32_t head)
      : shape_(shape),
        buffer_(buffer),
        head_(head),
        group_(shape.heads / shape.key_heads),
        gate_width_(SlotGateWidth(shape)) {}

  // Reads `count` slots starting with `first`: writes unchanged, and keys decayed to the end of the last one and
  // additionally by `log_decay` ([d_k], padded), to which the slots' own decay is then added. Suffix sums of
  // logarithms, all ≤ 0: nothing can overflow.
  void Read(int32_t first, int32_t count, MutableRows keys, MutableRows writes, float* log_decay,
            Upcoming* upcoming) const {
    const size_t d_k = static_cast<size_t>(shape_.d_k), d_v = static_cast<size_t>(shape_.d_v);
    HWY_ALIGN float decay[kMaxHeadDim], logs[kSlotBlock], decays[kSlotBlock];
    const auto gates_of = [&](int32_t j) {
      return buffer_.gates + (SlotRow(buffer_, first + j) * shape_.heads + head_) * gate_width_;
    };
    if (gate_width_ == 1) {
      for (int32_t j = count - 1; j >= 0; --j) {
        logs[j] = log_decay[0];
        log_decay[0] += *gates_of(j);
      }
      DecaysOf(logs, static_cast<size_t>(count), decays);
    }
    for (int32_t j = count - 1; j >= 0; --j) {
      Fetch(upcoming, kStepsOfSlot);
      const int64_t row = SlotRow(buffer_, first + j);
      WithElements(buffer_.dtype, [&](auto element) {
        using E = decltype(element);
        Widen<E>(Elements<E>(buffer_.keys, KeyIndex(row)), d_k, gate_width_ == 1 ? decays[j] : 1.0f, keys[j]);
        Widen<E>(Elements<E>(buffer_.writes, WriteIndex(row)), d_v, 1, writes[j]);
      });
      std::fill(keys[j] + d_k, keys[j] + keys.columns, 0.0f);
      std::fill(writes[j] + d_v, writes[j] + writes.columns, 0.0f);
      if (gate_width_ == 1) continue;
      DecaysOf(log_decay, keys.columns, decay);
      Multiply(keys[j], decay, keys.columns, keys[j]);
      const float* gates = gates_of(j);
      for (size_t i = 0; i < d_k; ++i) log_decay[i] += gates[i];
    }
    if (gate_width_ == 1) std::fill_n(log_decay, d_k, log_decay[0]);
  }

  // Prefetches what Read will read.
  void PrefetchAll() const {
    const size_t element = ElementBytes(buffer_.dtype);
    for (int32_t j = 0; j < buffer_.filled; ++j) {
      const int64_t row = SlotRow(buffer_, j);
      const auto at = [&](const void* plane, size_t index) {
        return static_cast<const char*>(plane) + index * element;
      };
      if (head_ % group_ == 0) Prefetch(at(buffer_.keys, KeyIndex(row)), static_cast<size_t>(shape_.d_k) * element);
      Prefetch(at(buffer_.writes, WriteIndex(row)), static_cast<size_t>(shape_.d_v) * element);
      Prefetch(buffer_.gates + (row * shape_.heads + head_) * gate_width_,
               static_cast<size_t>(gate_width_) * sizeof(float));
    }
  }

  // Fills slot j. Of heads that share a key the first writes it.
  void Append(int32_t j, const float* key, const float* write, const float* log_decay) const {
    const int64_t row = SlotRow(buffer_, j);
    std::copy_n(log_decay, gate_width_, buffer_.gates + (row * shape_.heads + head_) * gate_width_);
    WithElements(buffer_.dtype, [&](auto element) {
      using E = decltype(element);
      Narrow<E>(write, static_cast<size_t>(shape_.d_v), 1, Elements<E>(buffer_.writes, WriteIndex(row)));
      if (head_ % group_ != 0) return;
      Narrow<E>(key, static_cast<size_t>(shape_.d_k), 1, Elements<E>(buffer_.keys, KeyIndex(row)));
    });
  }

 private:
  size_t KeyIndex(int64_t row) const {
    return static_cast<size_t>((row * shape_.key_heads + head_ / group_) * shape_.d_k);
  }
  size_t WriteIndex(int64_t row) const { return static_cast<size_t>((row * shape_.heads + head_) * shape_.d_v); }

  const LinearShape& shape_;
  const TokenBuffer& buffer_;
  const int32_t head_, group_, gate_width_;
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
