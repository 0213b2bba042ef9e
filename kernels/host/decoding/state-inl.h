// SPDX-License-Identifier: Apache-2.0
// One head's state in the caller's order. It is changed where it lies if fp32, or if bf16 and changed only once, since
// each change rounds; else in a copy of fp32. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_STATE_INL_H_
#undef ASHLAR_KERNELS_HOST_STATE_INL_H_
#else
#define ASHLAR_KERNELS_HOST_STATE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "hwy/highway.h"
#include "kernels/host/decoding/products-inl.h"
#include "kernels/host/rows/rows_vector.h"
#include "kernels/host/simd/matrix-inl.h"
#include "kernels/linear.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

class HeadState {
 public:
  // `copy`: memory for a state whose rows are padded to whole vectors.
  HeadState(const LinearShape& shape, const StateView& view, int32_t head, float* copy)
      : view_(view),
        head_(head),
        key_first_(shape.order == StateOrder::kKeyFirst),
        width_(static_cast<size_t>(key_first_ ? shape.d_v : shape.d_k)),
        in_place_(view.dtype == DType::kF32 && width_ % kLanes == 0),
        copy_(copy) {
    const size_t padded = RoundUp(width_, kLanes);
    rows_ = {in_place_ ? static_cast<float*>(view.heads[head]) : copy, padded,
             static_cast<size_t>(key_first_ ? shape.d_k : shape.d_v), padded};
  }

  void Load() { LoadFrom(view_); }

  // Another state of the same shape, or zero if it has no heads.
  void LoadFrom(const StateView& from) {
    loaded_ = true;
    if (from.heads == nullptr) {
      std::fill_n(rows_.data, rows_.rows * rows_.stride, 0.0f);
      return;
    }
    if (in_place_ && from.heads[head_] == rows_.data) return;
    const float scale = from.dtype == DType::kF16 ? std::ldexp(1.0f, from.exponents[head_]) : 1.0f;
    WithElements(from.dtype, [&](auto element) {
      using E = decltype(element);
      for (size_t i = 0; i < rows_.rows; ++i) {
        Widen<E>(Elements<E>(from.heads[head_], i * width_), width_, scale, rows_[i]);
        std::fill(rows_[i] + width_, rows_[i] + rows_.columns, 0.0f);
      }
    });
  }

  void Store() const {
    if (!in_place_ && loaded_) Round(view_.dtype, view_.heads[head_], view_.exponents);
  }

  // Also writes the loaded or in-place state to `to`. An in-place state leaves copy_ free: it is rounded there and
  // streamed past the caches, so that no line is read only to be overwritten. FinishStreaming must follow.
  void StreamTo(const StateView& to) const {
    if (!in_place_) return Round(to.dtype, to.heads[head_], to.exponents);
    Round(to.dtype, copy_, to.exponents);
    CopyBytes(copy_, to.heads[head_], rows_.rows * width_ * ElementBytes(to.dtype), Stores::kStreaming);
  }

  // products[r, :] += Sᵀ reads[r, :], rows padded to whole vectors. A state that was not loaded is read as it is
  // stored; `reads` is used up.
  void AddReads(float* reads, size_t count, float* products) {
    if (loaded_ || in_place_ || width_ % kLanes != 0) {
      if (!loaded_) Load();
      return AddReadsOf(Const(rows_), reads, count, products);
    }
    if (view_.dtype == DType::kF16) {
      const size_t row = key_first_ ? RoundUp(rows_.rows, kLanes) : rows_.columns;
      const float scale = std::ldexp(1.0f, view_.exponents[head_]);
      for (size_t i = 0; i < count * row; ++i) reads[i] *= scale;
    }
    WithElements(view_.dtype, [&](auto element) {
      using E = decltype(element);
      AddReadsOf(StoredRows<E>{Elements<E>(static_cast<const void*>(view_.heads[head_])), width_, rows_.rows, width_},
                 reads, count, products);
    });
  }

  // S ← diag(decay) S + Σ_j keys[j] writes[j]ᵀ. A state that was not loaded is rounded and stored here, so that Store
  // has nothing to do; not for fp16, whose exponent depends on all of its numbers.
  void Update(const float* decay, const MutableRows& keys, const MutableRows& writes,
              Upcoming* upcoming = nullptr) const {
    if (loaded_ || in_place_) return UpdateRows(rows_, decay, keys, writes, upcoming);
    UpdateRows(WritableRows<BF16>{Elements<BF16>(view_.heads[head_]), width_, rows_.rows, width_}, decay, keys, writes,
               upcoming);
  }
  // Returns whether a state that was not loaded can take one Update.
  bool UpdatesAsStored() const { return in_place_ || (view_.dtype == DType::kBF16 && width_ % kLanes == 0); }

 private:
  template <class E>
  void AddReadsOf(const StoredRows<E>& rows, const float* reads, size_t count, float* products) const {
    if (key_first_) {
      AddLargeProduct(reads, RoundUp(rows.rows, kLanes), count, rows, products, rows.columns);
    } else {
      AddDots(reads, rows.columns, count, rows, products, RoundUp(rows.rows, kLanes));
    }
  }

  template <class E>
  void UpdateRows(const WritableRows<E>& rows, const float* decay, const MutableRows& keys, const MutableRows& writes,
                  Upcoming* upcoming) const {
    if (key_first_) {
      AddOuter<Scale::kByRow>(decay, keys.data, keys.stride, Const(writes), rows, upcoming);
    } else {
      AddOuter<Scale::kByColumn>(decay, writes.data, writes.stride, Const(keys), rows, upcoming);
    }
  }

  // Rounds all rows to `to`; of fp16 the exponent is chosen and noted.
  void Round(DType dtype, void* to, int32_t* exponents) const {
    const float scale = dtype == DType::kF16 ? std::ldexp(1.0f, -(exponents[head_] = Exponent())) : 1.0f;
    WithElements(dtype, [&](auto element) {
      using E = decltype(element);
      for (size_t i = 0; i < rows_.rows; ++i) Narrow<E>(rows_[i], width_, scale, Elements<E>(to, i * width_));
    });
  }

  int Exponent() const {
    Vec largest = hn::Zero(Tag());
    for (size_t i = 0; i < rows_.rows; ++i) largest = LargestOf(rows_[i], rows_.columns, largest);
    return HalfExponent(hn::GetLane(hn::MaxOfLanes(Tag(), largest)));
  }

  const StateView& view_;
  const int32_t head_;
  const bool key_first_;
  const size_t width_;  // floats per row
  const bool in_place_;
  float* const copy_;
  MutableRows rows_;
  bool loaded_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
