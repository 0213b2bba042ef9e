// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/decoding_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/testing/backends.h"

namespace ashlar::kernels::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void Normalise(float* row, int32_t count) {
  double squares = 0;
  for (int32_t i = 0; i < count; ++i) squares += double{row[i]} * row[i];
  const double norm = std::max(std::sqrt(squares), 1e-3);
  for (int32_t i = 0; i < count; ++i) row[i] = static_cast<float>(row[i] / norm);
}

double LogDecay(Random& random, int32_t head) {
  return head % 2 == 0 ? -random.Uniform(1e-3, 4e-3) : -random.Uniform(0.05, 0.5);
}

std::vector<float> GatherRows(const std::vector<float>& from, int64_t stride, const std::vector<int64_t>& order) {
  std::vector<float> out;
  for (int64_t t : order) out.insert(out.end(), from.begin() + t * stride, from.begin() + (t + 1) * stride);
  return out;
}

}  // namespace

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double squares = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::isfinite(squares) ? std::sqrt(squares) / std::max(std::sqrt(norm), 1e-30) : INFINITY;
}

DecodeLayer::DecodeLayer(Random& random, Family family, StateOrder order, int64_t its_count) : count(its_count) {
  shape.family = family;
  shape.order = order;
  shape.key_heads = static_cast<int32_t>(random.Integer(1, 2));
  shape.heads = shape.key_heads * static_cast<int32_t>(random.Integer(1, 3));
  // The kernels copy odd sizes, and read whole vectors in place.
  const bool odd = random.Integer(0, 1) == 0;
  shape.d_k = static_cast<int32_t>(odd ? random.Integer(4, 70) : 16 * random.Integer(1, 5));
  do {
    shape.d_v = static_cast<int32_t>(odd ? random.Integer(4, 70) : 16 * random.Integer(1, 5));
  } while (shape.d_v == shape.d_k);
  if (NaturalForm(family) == TransitionForm::kScalar) {
    for (int32_t h = 0; h < shape.heads; ++h) table.push_back(static_cast<float>(LogDecay(random, h)));
    shape.decay_table = table.data();
  }
  const auto draw = [&](std::vector<float>& values, int64_t& stride, int64_t width, auto number) {
    stride = width + random.Integer(0, 3);
    values.assign(static_cast<size_t>(count * stride), kNan);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = 0; i < width; ++i) values[t * stride + i] = static_cast<float>(number(i));
    }
  };
  const auto normal = [&](int64_t) { return random.Normal(); };
  draw(q, q_stride, int64_t{shape.key_heads} * shape.d_k, [&](int64_t) { return random.Normal() / shape.d_k; });
  draw(k, k_stride, int64_t{shape.key_heads} * shape.d_k, normal);
  for (int64_t row = 0; row < count * shape.key_heads; ++row) {
    Normalise(k.data() + row / shape.key_heads * k_stride + row % shape.key_heads * shape.d_k, shape.d_k);
  }
  draw(v, v_stride, int64_t{shape.heads} * shape.d_v, normal);
  if (const int32_t width = GateWidth(shape); width > 0) {
    draw(g, g_stride, int64_t{shape.heads} * width,
         [&](int64_t i) { return LogDecay(random, static_cast<int32_t>(i / width)); });
  }
  if (BetaWidth(shape) > 0) draw(beta, beta_stride, shape.heads, [&](int64_t) { return random.Uniform(0.1, 1); });
}

TokenInputs DecodeLayer::View(int64_t begin, int64_t end) const {
  const auto at = [&](const std::vector<float>& values, int64_t stride) {
    return values.empty() ? nullptr : values.data() + begin * stride;
  };
  return {.tokens = end - begin,
          .q = at(q, q_stride),
          .k = at(k, k_stride),
          .v = at(v, v_stride),
          .g = at(g, g_stride),
          .beta = at(beta, beta_stride),
          .q_stride = q_stride,
          .k_stride = k_stride,
          .v_stride = v_stride,
          .g_stride = g_stride,
          .beta_stride = beta_stride};
}

DecodeLayer DecodeLayer::Gathered(const std::vector<int64_t>& order) const {
  DecodeLayer out;
  out.shape = shape;
  out.table = table;
  if (shape.decay_table != nullptr) out.shape.decay_table = out.table.data();
  out.count = static_cast<int64_t>(order.size());
  out.q_stride = q_stride, out.k_stride = k_stride, out.v_stride = v_stride;
  out.g_stride = g_stride, out.beta_stride = beta_stride;
  out.q = GatherRows(q, q_stride, order);
  out.k = GatherRows(k, k_stride, order);
  out.v = GatherRows(v, v_stride, order);
  if (!g.empty()) out.g = GatherRows(g, g_stride, order);
  if (!beta.empty()) out.beta = GatherRows(beta, beta_stride, order);
  return out;
}

TypedState::TypedState(const LinearShape& shape, DType dtype)
    : dtype_(dtype),
      head_floats_(int64_t{shape.d_k} * shape.d_v),
      heads_(shape.heads, std::vector<std::byte>(static_cast<size_t>(head_floats_) * ElementBytes(dtype))),
      exponents_(shape.heads, 0) {
  Point();
}

TypedState::TypedState(const LinearShape& shape, DType dtype, Random& random) : TypedState(shape, dtype) {
  for (size_t h = 0; h < heads_.size(); ++h) {
    if (dtype == DType::kF16) exponents_[h] = static_cast<int32_t>(random.Integer(0, 2));
    for (int64_t i = 0; i < head_floats_; ++i) {
      WriteElement(dtype, pointers_[h], i, static_cast<float>(std::ldexp(random.Normal(), -exponents_[h])));
    }
  }
}

TypedState::TypedState(const TypedState& other)
    : dtype_(other.dtype_), head_floats_(other.head_floats_), heads_(other.heads_), exponents_(other.exponents_) {
  Point();
}

TypedState& TypedState::operator=(const TypedState& other) {
  dtype_ = other.dtype_;
  head_floats_ = other.head_floats_;
  heads_ = other.heads_;
  exponents_ = other.exponents_;
  Point();
  return *this;
}

void TypedState::Point() {
  pointers_.clear();
  for (std::vector<std::byte>& head : heads_) pointers_.push_back(head.data());
}

std::vector<float> TypedState::Floats() const {
  std::vector<float> out;
  for (size_t h = 0; h < heads_.size(); ++h) {
    for (int64_t i = 0; i < head_floats_; ++i) {
      out.push_back(std::ldexp(ReadElement(dtype_, pointers_[h], i), exponents_[h]));
    }
  }
  return out;
}

SlotPages::SlotPages(Random& random, const LinearShape& shape, DType dtype, int32_t slots, int32_t page_tokens)
    : shape_(shape), dtype_(dtype), slots_(slots), page_tokens_(page_tokens) {
  const int32_t pages = (slots + page_tokens - 1) / page_tokens;
  table_ = random.Permutation(pages);
  table_.push_back(std::numeric_limits<int32_t>::max() / 2);
  const size_t rows = static_cast<size_t>(pages) * static_cast<size_t>(page_tokens);
  keys_.resize(rows * static_cast<size_t>(shape.key_heads * shape.d_k) * ElementBytes(dtype));
  writes_.resize(rows * static_cast<size_t>(shape.heads * shape.d_v) * ElementBytes(dtype));
  gates_.resize(rows * static_cast<size_t>(shape.heads * SlotGateWidth(shape)));
  Poison(0);
}

TokenBuffer SlotPages::View(int32_t filled) {
  return {.keys = keys_.data(),
          .writes = writes_.data(),
          .gates = gates_.data(),
          .dtype = dtype_,
          .page_tokens = page_tokens_,
          .page_table = table_.data(),
          .filled = filled};
}

void SlotPages::Poison(int32_t begin) {
  const TokenBuffer view = View(slots_);
  const auto poison = [&](std::byte* plane, int64_t row, size_t row_bytes) {
    std::memset(plane + static_cast<size_t>(row) * row_bytes, 0xFF, row_bytes);  // NaN in all three types
  };
  for (int32_t j = begin; j < slots_; ++j) {
    const int64_t row = SlotRow(view, j);
    poison(keys_.data(), row, static_cast<size_t>(shape_.key_heads * shape_.d_k) * ElementBytes(dtype_));
    poison(writes_.data(), row, static_cast<size_t>(shape_.heads * shape_.d_v) * ElementBytes(dtype_));
    poison(reinterpret_cast<std::byte*>(gates_.data()), row,
           static_cast<size_t>(shape_.heads * SlotGateWidth(shape_)) * sizeof(float));
  }
}

std::vector<float> SlotPages::Write(int32_t j, int32_t h) {
  const int64_t first = (SlotRow(View(slots_), j) * shape_.heads + h) * shape_.d_v;
  std::vector<float> out;
  for (int32_t i = 0; i < shape_.d_v; ++i) out.push_back(ReadElement(dtype_, writes_.data(), first + i));
  return out;
}

void SlotPages::SetWrite(int32_t j, int32_t h, const float* values) {
  const int64_t first = (SlotRow(View(slots_), j) * shape_.heads + h) * shape_.d_v;
  for (int32_t i = 0; i < shape_.d_v; ++i) WriteElement(dtype_, writes_.data(), first + i, values[i]);
}

float* SlotPages::Gates(int32_t j, int32_t h) {
  return gates_.data() + (SlotRow(View(slots_), j) * shape_.heads + h) * SlotGateWidth(shape_);
}

std::vector<float> SlotPages::Floats(int32_t count) {
  std::vector<float> out;
  const TokenBuffer view = View(slots_);
  const int64_t key_floats = int64_t{shape_.key_heads} * shape_.d_k;
  for (int32_t j = 0; j < count; ++j) {
    const int64_t row = SlotRow(view, j);
    for (int64_t i = 0; i < key_floats; ++i) out.push_back(ReadElement(dtype_, keys_.data(), row * key_floats + i));
    for (int32_t h = 0; h < shape_.heads; ++h) {
      const std::vector<float> write = Write(j, h);
      out.insert(out.end(), write.begin(), write.end());
      out.insert(out.end(), Gates(j, h), Gates(j, h) + SlotGateWidth(shape_));
    }
  }
  return out;
}

RecurrentPass::RecurrentPass(const DecodeLayer& layer, int64_t begin, int64_t end, const TypedState* initial)
    : shape(layer.shape), out(static_cast<size_t>((end - begin) * shape.heads * shape.d_v)) {
  TypedState state(shape, DType::kF32);
  Runner runner(Reference());
  if (initial != nullptr) {
    TypedState from = *initial;
    runner.Run(RebuildStateArgs{.shape = shape, .request = {.state = from.View()}, .target = state.View()});
  }
  std::vector<TypedState> checkpoints(static_cast<size_t>(end - begin), state);
  std::vector<StateView> views;
  for (TypedState& checkpoint : checkpoints) views.push_back(checkpoint.View());
  std::vector<SeamStep> steps;
  for (int64_t t = 0; t < end - begin; ++t) steps.push_back({.begin = t, .end = t + 1, .checkpoint = &views[t]});
  states.push_back(state.Floats());
  runner.Run(AdvanceSeamArgs{.shape = shape,
                             .steps = steps,
                             .inputs = layer.View(begin, end),
                             .state = state.View(),
                             .out = out.data(),
                             .out_stride = int64_t{shape.heads} * shape.d_v});
  for (const TypedState& checkpoint : checkpoints) states.push_back(checkpoint.Floats());
}

std::vector<float> RecurrentPass::Out(int64_t t, int32_t h) const {
  const auto first = out.begin() + (t * shape.heads + h) * shape.d_v;
  return {first, first + shape.d_v};
}

double DecodeTolerance(DType state, DType buffer, int flushes) {
  double tolerance = 1e-5;
  if (state != DType::kF32) tolerance += UnitRoundoff(state) * (0.5 * std::sqrt(flushes) + 1);
  if (buffer != DType::kF32) tolerance += UnitRoundoff(buffer) * 1.5;
  return tolerance;
}

}  // namespace ashlar::kernels::testing
