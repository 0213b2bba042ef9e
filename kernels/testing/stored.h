// SPDX-License-Identifier: Apache-2.0
// Inputs and outputs of operations on linear layers, with their own memory: states and tuples of any dtype and form.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace ashlar::kernels::testing {

// The dtypes of tuples and of the running state.
struct Dtypes {
  DType transition = DType::kF32, state = DType::kF32, running = DType::kF32;
};

// One matrix per head: a running state, or tuples' end states. Every head has a separate allocation, so that a
// sanitizer detects every access outside.
class States {
 public:
  States(const LinearShape& shape, DType dtype);

  StateView View();
  int32_t heads() const { return static_cast<int32_t>(bytes_.size()); }
  int64_t count() const { return count_; }  // numbers of a head
  DType dtype() const { return dtype_; }
  int32_t exponent(int32_t head) const { return exponents_[head]; }
  int32_t* exponents() { return dtype_ == DType::kF16 ? exponents_.data() : nullptr; }
  const void* data(int32_t head) const { return bytes_[head].data(); }
  void* data(int32_t head) { return bytes_[head].data(); }

  // A head's numbers in memory order, with the exponent applied.
  std::vector<double> Values(int32_t head) const;
  // Rounds numbers of any size into a head; for fp16 with the exponent of the contract.
  void Set(int32_t head, std::span<const double> values);
  void SetElement(int32_t head, int64_t index, float value) { WriteElement(dtype_, data(head), index, value); }
  void SetExponent(int32_t head, int32_t exponent) { exponents_[head] = exponent; }
  States Rounded(const LinearShape& shape, DType dtype) const;

 private:
  DType dtype_;
  int64_t count_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<int32_t> exponents_;
  std::vector<void*> pointers_;  // formed by View
};

// T = diag(d) + Aᵀ B; d is [d_k], a and b are [rank, d_k].
struct Factors {
  std::vector<double> d, a, b;
};

// One tuple: created in the family's natural form, and converted into other forms by the functions below.
class Tuple {
 public:
  Tuple(const LinearShape& shape, Dtypes dtypes);

  // Created by each call: call it again after the tuple was written, changed or copied.
  TupleView View() const;
  TupleTarget Target();

  const LinearShape& shape() const { return shape_; }
  TransitionForm form(int32_t head) const { return transitions_[head].form; }
  DType transition_dtype() const { return dtypes_.transition; }
  States& states() { return states_; }
  const States& states() const { return states_; }

  // The stored numbers of a head's transition: logarithms, or a matrix in the shape's order. Not for low rank.
  std::vector<double> Transition(int32_t head) const;
  void SetTransition(int32_t head, std::span<const double> values);
  // Erases a head's transition.
  void MakeZero(int32_t head);
  void MakeLowRank(int32_t head, const Factors& factors);
  Factors LowRank(int32_t head) const;
  // The same tuple in other dtypes.
  Tuple Rounded(Dtypes dtypes) const;

  int64_t position = 0;  // first position of the segment

 private:
  struct Head {
    TransitionForm form;
    int32_t rank = 0;
    std::vector<std::byte> bytes;
  };
  // The 16-bit or fp32 numbers of `head` begin after its diagonal.
  size_t FactorsOffset() const { return static_cast<size_t>(shape_.d_k) * sizeof(float); }

  LinearShape shape_;
  Dtypes dtypes_;
  std::vector<Head> transitions_;
  States states_;
  std::vector<void*> pointers_;
  mutable std::vector<HeadTuple> views_;
};

// Numbers that a head's transition has in a form: logarithms or matrix elements.
int64_t TransitionCount(const LinearShape& shape, TransitionForm form);

}  // namespace ashlar::kernels::testing
