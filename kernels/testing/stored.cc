// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/stored.h"

#include <algorithm>
#include <cmath>

namespace ashlar::kernels::testing {
namespace {

bool IsMatrix(TransitionForm form) {
  return form == TransitionForm::kDense || form == TransitionForm::kLowRank;
}

std::vector<double> Read(DType dtype, const void* from, int64_t count) {
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = ReadElement(dtype, from, i);
  return values;
}

void Write(DType dtype, void* to, std::span<const double> values, int exponent = 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    WriteElement(dtype, to, static_cast<int64_t>(i), static_cast<float>(std::ldexp(values[i], -exponent)));
  }
}

}  // namespace

States::States(const LinearShape& shape, DType dtype)
    : dtype_(dtype), count_(int64_t{shape.d_k} * shape.d_v), bytes_(shape.heads), exponents_(shape.heads) {
  for (std::vector<std::byte>& head : bytes_) head.resize(count_ * ElementBytes(dtype));
}

StateView States::View() {
  pointers_.clear();
  for (std::vector<std::byte>& head : bytes_) pointers_.push_back(head.data());
  return {.heads = pointers_.data(), .dtype = dtype_, .exponents = exponents()};
}

std::vector<double> States::Values(int32_t head) const {
  std::vector<double> values = Read(dtype_, data(head), count_);
  for (double& value : values) value = std::ldexp(value, exponents_[head]);
  return values;
}

void States::Set(int32_t head, std::span<const double> values) {
  int exponent = 0;
  if (dtype_ == DType::kF16) {
    double largest = 0;
    for (double value : values) largest = std::max(largest, std::fabs(value));
    while (std::isfinite(largest) && largest > std::ldexp(1.0, exponent + 15)) ++exponent;
  }
  exponents_[head] = exponent;
  Write(dtype_, data(head), values, exponent);
}

States States::Rounded(const LinearShape& shape, DType dtype) const {
  States rounded(shape, dtype);
  for (int32_t h = 0; h < heads(); ++h) rounded.Set(h, Values(h));
  return rounded;
}

int64_t TransitionCount(const LinearShape& shape, TransitionForm form) {
  switch (form) {
    case TransitionForm::kScalar:
      return 1;
    case TransitionForm::kDiagonal:
      return shape.d_k;
    case TransitionForm::kElementwise:
      return shape.d_v;
    case TransitionForm::kDense:
      return int64_t{shape.d_k} * shape.d_k;
    case TransitionForm::kLowRank:
    case TransitionForm::kZero:
      return 0;
  }
  return 0;
}

Tuple::Tuple(const LinearShape& shape, Dtypes dtypes)
    : shape_(shape),
      dtypes_(dtypes),
      transitions_(shape.heads, Head{.form = NaturalForm(shape.family)}),
      states_(shape, dtypes.state) {
  const TransitionForm form = NaturalForm(shape.family);
  const size_t bytes = TransitionCount(shape, form) * ElementBytes(IsMatrix(form) ? dtypes.transition : DType::kF32);
  for (Head& head : transitions_) head.bytes.resize(bytes);
}

TupleView Tuple::View() const {
  views_.clear();
  for (int32_t h = 0; h < shape_.heads; ++h) {
    const Head& head = transitions_[h];
    views_.push_back({.form = head.form,
                      .rank = head.rank,
                      .transition = head.form == TransitionForm::kZero ? nullptr : head.bytes.data(),
                      .state = states_.data(h),
                      .state_exponent = states_.exponent(h)});
  }
  return {.heads = views_.data(),
          .transition_dtype = dtypes_.transition,
          .state_dtype = dtypes_.state,
          .position = position};
}

TupleTarget Tuple::Target() {
  pointers_.clear();
  for (Head& head : transitions_) pointers_.push_back(head.bytes.data());
  return {.transition = pointers_.data(),
          .state = states_.View().heads,
          .transition_dtype = dtypes_.transition,
          .state_dtype = dtypes_.state,
          .state_exponents = states_.exponents()};
}

std::vector<double> Tuple::Transition(int32_t head) const {
  const TransitionForm form = transitions_[head].form;
  return Read(IsMatrix(form) ? dtypes_.transition : DType::kF32, transitions_[head].bytes.data(),
              TransitionCount(shape_, form));
}

void Tuple::SetTransition(int32_t head, std::span<const double> values) {
  Write(IsMatrix(transitions_[head].form) ? dtypes_.transition : DType::kF32, transitions_[head].bytes.data(), values);
}

void Tuple::MakeZero(int32_t head) {
  transitions_[head] = {.form = TransitionForm::kZero};
}

void Tuple::MakeLowRank(int32_t head, const Factors& factors) {
  const size_t factor_bytes = factors.a.size() * ElementBytes(dtypes_.transition);
  Head& to = transitions_[head];
  to.form = TransitionForm::kLowRank;
  to.rank = static_cast<int32_t>(factors.a.size() / shape_.d_k);
  to.bytes.resize(FactorsOffset() + 2 * factor_bytes);
  Write(DType::kF32, to.bytes.data(), factors.d);
  Write(dtypes_.transition, to.bytes.data() + FactorsOffset(), factors.a);
  Write(dtypes_.transition, to.bytes.data() + FactorsOffset() + factor_bytes, factors.b);
}

Factors Tuple::LowRank(int32_t head) const {
  const Head& from = transitions_[head];
  const int64_t factor = int64_t{from.rank} * shape_.d_k;
  const std::byte* a = from.bytes.data() + FactorsOffset();
  return {.d = Read(DType::kF32, from.bytes.data(), shape_.d_k),
          .a = Read(dtypes_.transition, a, factor),
          .b = Read(dtypes_.transition, a + factor * ElementBytes(dtypes_.transition), factor)};
}

Tuple Tuple::Rounded(Dtypes dtypes) const {
  Tuple rounded(shape_, dtypes);
  rounded.position = position;
  rounded.states_ = states_.Rounded(shape_, dtypes.state);
  for (int32_t h = 0; h < shape_.heads; ++h) {
    if (form(h) == TransitionForm::kZero) {
      rounded.MakeZero(h);
    } else if (form(h) == TransitionForm::kLowRank) {
      rounded.MakeLowRank(h, LowRank(h));
    } else {
      rounded.SetTransition(h, Transition(h));
    }
  }
  return rounded;
}

}  // namespace ashlar::kernels::testing
