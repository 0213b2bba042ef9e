// SPDX-License-Identifier: Apache-2.0
// Linear layers: composing, capturing and advancing, at the sizes of real models.
#include <array>
#include <cstring>
#include <memory>
#include <new>

#include "kernels/testing/names.h"
#include "tools/bench/case_memory.h"
#include "tools/bench/kernel_cases.h"

namespace ashlar::bench {
namespace {

using kernels::LinearShape;
using kernels::testing::kFamilies;
using kernels::testing::Name;

constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16};

// The layer of a case, and all memory to which its arguments point.
class Layer {
 public:
  explicit Layer(const LinearShape& shape) : shape_(shape) {
    if (shape.family != Family::kMamba1 && NaturalForm(shape.family) != TransitionForm::kScalar) return;
    const size_t count = shape.family == Family::kMamba1 ? StateNumbers() : 1;
    shape_.decay_table = Floats(count * static_cast<size_t>(shape.heads), -0.05f, 0.04f);
  }

  const LinearShape& shape() const { return shape_; }
  size_t StateNumbers() const { return static_cast<size_t>(shape_.d_k) * static_cast<size_t>(shape_.d_v); }

  // Bytes of one head's transition.
  size_t TransitionBytes(DType dtype, TransitionForm form, int32_t rank) const {
    const auto d_k = static_cast<size_t>(shape_.d_k);
    switch (form) {
      case TransitionForm::kScalar:
        return sizeof(float);
      case TransitionForm::kDiagonal:
        return d_k * sizeof(float);
      case TransitionForm::kElementwise:
        return static_cast<size_t>(shape_.d_v) * sizeof(float);
      case TransitionForm::kDense:
        return d_k * d_k * ElementBytes(dtype);
      case TransitionForm::kLowRank:
        return d_k * sizeof(float) + 2 * static_cast<size_t>(rank) * d_k * ElementBytes(dtype);
      case TransitionForm::kZero:
        return 0;
    }
    return 0;
  }

  // A tuple whose transition is a contraction, so that a repeatedly composed state stays finite.
  void AddTuple(DType dtype, TransitionForm form, int32_t rank) {
    std::vector<kernels::HeadTuple>& heads = heads_.emplace_back();
    for (int32_t h = 0; h < shape_.heads; ++h) {
      kernels::HeadTuple head{.form = form, .rank = rank};
      head.state = Elements(dtype, StateNumbers(), 1);
      if (form == TransitionForm::kDense) {
        head.transition = Elements(dtype, TransitionBytes(dtype, form, 0) / ElementBytes(dtype), 0.02f);
      } else if (form == TransitionForm::kLowRank) {
        auto* bytes = Elements(dtype, TransitionBytes(dtype, form, rank) / ElementBytes(dtype), 0.02f);
        std::memset(bytes, 0, static_cast<size_t>(shape_.d_k) * sizeof(float));  // the diagonal: zero
        head.transition = bytes;
      } else if (form != TransitionForm::kZero) {
        const float size = form == TransitionForm::kElementwise ? 1.0f : -0.5f;
        head.transition = Floats(TransitionBytes(dtype, form, 0) / sizeof(float), size, size / 2);
      }
      heads.push_back(head);
    }
    views_.push_back({.heads = heads.data(), .transition_dtype = dtype, .state_dtype = dtype});
  }
  std::span<const kernels::TupleView> tuples() const { return views_; }

  kernels::StateView State(DType dtype) {
    for (int32_t h = 0; h < shape_.heads; ++h) state_.push_back(Elements(dtype, StateNumbers(), 1));
    exponents_.assign(static_cast<size_t>(shape_.heads), 0);
    return {.heads = state_.data(), .dtype = dtype, .exponents = dtype == DType::kF16 ? exponents_.data() : nullptr};
  }

  kernels::TupleTarget Target(DType dtype) {
    const size_t bytes = TransitionBytes(dtype, NaturalForm(shape_.family), 0);
    for (int32_t h = 0; h < shape_.heads; ++h) transition_.push_back(buffers_.emplace_back(bytes).memory.get());
    const kernels::StateView state = State(dtype);
    return {.transition = transition_.data(),
            .state = state.heads,
            .transition_dtype = dtype,
            .state_dtype = dtype,
            .state_exponents = state.exponents};
  }

  kernels::TokenInputs Tokens(int64_t tokens) {
    const auto floats = [&](int64_t width, float middle, float range) {
      return width == 0 ? nullptr : Floats(static_cast<size_t>(tokens * width), middle, range);
    };
    kernels::TokenInputs in{.tokens = tokens};
    in.q_stride = in.k_stride = int64_t{shape_.key_heads} * shape_.d_k;
    in.v_stride = int64_t{shape_.heads} * shape_.d_v;
    in.g_stride = int64_t{shape_.heads} * GateWidth(shape_);
    in.beta_stride = int64_t{shape_.heads} * BetaWidth(shape_);
    in.q = floats(in.q_stride, 0, 0.1f);
    in.k = floats(in.k_stride, 0, 0.15f);  // of norm about 1 at 128 dimensions
    in.v = floats(in.v_stride, 0, 1);
    in.g = floats(in.g_stride, -0.05f, 0.04f);
    in.beta = floats(in.beta_stride, 0.5f, 0.4f);
    return in;
  }

  float* Outputs(int64_t tokens) {
    return Floats(static_cast<size_t>(tokens) * static_cast<size_t>(shape_.heads * shape_.d_v), 0, 0);
  }

 private:
  float* Floats(size_t count, float middle, float range) {
    auto* floats = reinterpret_cast<float*>(buffers_.emplace_back(count * sizeof(float)).memory.get());
    for (size_t i = 0; i < count; ++i) floats[i] = middle + numbers_.Next(range);
    return floats;
  }
  std::byte* Elements(DType dtype, size_t count, float size) {
    std::byte* elements = buffers_.emplace_back(count * ElementBytes(dtype)).memory.get();
    FillElements(dtype, elements, count, size, numbers_);
    return elements;
  }

  LinearShape shape_;
  Numbers numbers_;
  std::vector<Buffer> buffers_;
  std::vector<std::vector<kernels::HeadTuple>> heads_;
  std::vector<kernels::TupleView> views_;
  std::vector<void*> transition_, state_;
  std::vector<int32_t> exponents_;
};

LinearShape ShapeOf(Family family, int32_t heads, StateOrder order = StateOrder::kKeyFirst) {
  LinearShape shape{.family = family, .heads = heads, .key_heads = heads, .d_k = 128, .d_v = 128, .order = order};
  if (family == Family::kGdn) shape.key_heads = heads / 2;
  if (family == Family::kMamba2) shape.d_v = 64;
  if (family == Family::kMamba1) shape.d_k = 16, shape.d_v = 256;
  if (family == Family::kMamba1 || family == Family::kMamba2) shape.key_heads = 1;
  return shape;
}

std::string Describe(const LinearShape& shape, const std::string& length) {
  return length + ", heads " + std::to_string(shape.heads) + ", " + std::to_string(shape.d_k) + "x" +
         std::to_string(shape.d_v) + (shape.order == StateOrder::kValueFirst ? ", v-first" : "");
}

// Operations of one token of one head on `columns` columns of [S | T]: erasing reads all rows, and writing writes all.
double TokenFlops(const LinearShape& shape, int32_t columns) {
  return (Erases(shape.family) ? 4.0 : 2.0) * shape.d_k * columns;
}
double InputBytes(const LinearShape& shape) {
  return sizeof(float) * (double{2} * shape.key_heads * shape.d_k +
                          double(shape.heads) * (shape.d_v + GateWidth(shape) + BetaWidth(shape)));
}

// Operations of one head's transition on `columns` columns.
double ComposeFlops(const LinearShape& shape, TransitionForm form, int32_t rank, int32_t columns) {
  if (form == TransitionForm::kDense) return 2.0 * shape.d_k * shape.d_k * columns;
  if (form == TransitionForm::kLowRank) return 4.0 * rank * shape.d_k * columns;
  return form == TransitionForm::kZero ? 0.0 : 2.0 * shape.d_k * columns;
}

struct Composition {
  LinearShape shape;
  int n;
  DType dtype;
  TransitionForm form;
  int32_t rank = 0;
};

KernelCase ComposeCase(const Composition& c) {
  const Layer sizes(c.shape);
  const double state_bytes = static_cast<double>(sizes.StateNumbers() * ElementBytes(c.dtype));
  const double tuple_bytes = state_bytes + static_cast<double>(sizes.TransitionBytes(c.dtype, c.form, c.rank));
  std::string length = "n " + std::to_string(c.n);
  if (c.form == TransitionForm::kLowRank) length += ", rank " + std::to_string(c.rank);
  if (c.form == TransitionForm::kZero) length += ", zero";
  return {.op = "Compose",
          .family = Name(c.shape.family),
          .dtype = Name(c.dtype),
          .shape = Describe(c.shape, length),
          .bytes = c.shape.heads * (c.n * tuple_bytes + 2 * state_bytes),
          .flops = c.shape.heads * c.n * ComposeFlops(c.shape, c.form, c.rank, c.shape.d_v),
          .prepare = [c](const kernels::Kernels& back_end, kernels::Queue& queue) -> std::function<void()> {
            const auto layer = std::make_shared<Layer>(c.shape);
            for (int i = 0; i < c.n; ++i) layer->AddTuple(c.dtype, c.form, c.rank);
            const kernels::StateView state = layer->State(c.dtype);
            return [=, &back_end, &queue] {
              back_end.Compose({.shape = layer->shape(), .interiors = layer->tuples(), .state = state}, queue).Wait();
            };
          }};
}

KernelCase ComposeTransitionsCase(const Composition& c) {
  KernelCase out = ComposeCase(c);
  const Layer sizes(c.shape);
  out.op = "ComposeTransitions";
  out.bytes += static_cast<double>(c.shape.heads) *
               (static_cast<double>(sizes.TransitionBytes(c.dtype, NaturalForm(c.shape.family), 0)) -
                static_cast<double>(sizes.StateNumbers() * ElementBytes(c.dtype)));  // no state is read
  if (NaturalForm(c.shape.family) == TransitionForm::kDense) {
    out.flops += c.shape.heads * c.n * ComposeFlops(c.shape, c.form, c.rank, c.shape.d_k);
  }
  out.prepare = [c](const kernels::Kernels& back_end, kernels::Queue& queue) -> std::function<void()> {
    const auto layer = std::make_shared<Layer>(c.shape);
    for (int i = 0; i < c.n; ++i) layer->AddTuple(c.dtype, c.form, c.rank);
    const kernels::TupleTarget target = layer->Target(c.dtype);
    return [=, &back_end, &queue] {
      back_end.ComposeTransitions({.shape = layer->shape(), .interiors = layer->tuples(), .tuple = target}, queue)
          .Wait();
    };
  };
  return out;
}

KernelCase CaptureCase(const LinearShape& shape, int64_t tokens, DType dtype) {
  const Layer sizes(shape);
  const TransitionForm form = NaturalForm(shape.family);
  const double out_bytes =
      static_cast<double>(sizes.StateNumbers() * ElementBytes(dtype) + sizes.TransitionBytes(dtype, form, 0));
  const int32_t columns = shape.d_v + (form == TransitionForm::kDense ? shape.d_k : 0);
  return {.op = "Capture",
          .family = Name(shape.family),
          .dtype = Name(dtype),
          .shape = Describe(shape, "tokens " + std::to_string(tokens)),
          .bytes = static_cast<double>(tokens) * InputBytes(shape) + shape.heads * out_bytes,
          .flops = static_cast<double>(tokens) * shape.heads * TokenFlops(shape, columns),
          .prepare = [=](const kernels::Kernels& back_end, kernels::Queue& queue) -> std::function<void()> {
            const auto layer = std::make_shared<Layer>(shape);
            const kernels::TokenInputs inputs = layer->Tokens(tokens);
            const kernels::TupleTarget target = layer->Target(dtype);
            return [=, &back_end, &queue] {
              back_end.Capture({.shape = layer->shape(), .inputs = inputs, .tuple = target}, queue).Wait();
            };
          }};
}

// `interiors` cached interiors, each followed by a run of `run` tokens; none: one run.
KernelCase AdvanceCase(const LinearShape& shape, int interiors, int64_t run, DType dtype) {
  const Layer sizes(shape);
  const TransitionForm form = NaturalForm(shape.family);
  const int64_t tokens = run * std::max(interiors, 1);
  const double state_bytes = static_cast<double>(sizes.StateNumbers() * ElementBytes(dtype));
  const double tuple_bytes = state_bytes + static_cast<double>(sizes.TransitionBytes(dtype, form, 0));
  const double read_flops = 2.0 * shape.d_k * shape.d_v;
  return {.op = "AdvanceSeam",
          .family = Name(shape.family),
          .dtype = Name(dtype),
          .shape = Describe(
              shape, (interiors > 0 ? "n " + std::to_string(interiors) + ", " : "") + "run " + std::to_string(run)),
          .bytes = static_cast<double>(tokens) * (InputBytes(shape) + sizeof(float) * shape.heads * shape.d_v) +
                   shape.heads * (interiors * tuple_bytes + 2 * state_bytes),
          .flops = static_cast<double>(tokens) * shape.heads * (TokenFlops(shape, shape.d_v) + read_flops) +
                   shape.heads * interiors * ComposeFlops(shape, form, 0, shape.d_v),
          .prepare = [=](const kernels::Kernels& back_end, kernels::Queue& queue) -> std::function<void()> {
            const auto layer = std::make_shared<Layer>(shape);
            const auto steps = std::make_shared<std::vector<kernels::SeamStep>>();
            for (int i = 0; i < interiors; ++i) layer->AddTuple(dtype, form, 0);
            for (int i = 0; i < std::max(interiors, 1); ++i) {
              if (interiors > 0) steps->push_back({.interior = &layer->tuples()[static_cast<size_t>(i)]});
              steps->push_back({.begin = i * run, .end = (i + 1) * run});
            }
            const kernels::TokenInputs inputs = layer->Tokens(tokens);
            const kernels::StateView state = layer->State(dtype);
            float* const out = layer->Outputs(tokens);
            return [=, &back_end, &queue] {
              back_end
                  .AdvanceSeam({.shape = layer->shape(),
                                .steps = *steps,
                                .inputs = inputs,
                                .state = state,
                                .out = out,
                                .out_stride = int64_t{shape.heads} * shape.d_v},
                               queue)
                  .Wait();
            };
          }};
}

}  // namespace

std::vector<KernelCase> LinearCases(bool quick) {
  const int32_t many = quick ? 32 : 1152, some = quick ? 4 : 32;
  const int64_t tokens = quick ? 96 : 1024;
  std::vector<KernelCase> cases;
  for (const Family family : kFamilies) {
    const TransitionForm form = NaturalForm(family);
    for (const DType dtype : kDTypes) {
      cases.push_back(ComposeCase({ShapeOf(family, many), 16, dtype, form}));
    }
    cases.push_back(ComposeCase({ShapeOf(family, many, StateOrder::kValueFirst), 16, DType::kF32, form}));
    cases.push_back(ComposeTransitionsCase({ShapeOf(family, many / 4), 4, DType::kF32, form}));
    cases.push_back(CaptureCase(ShapeOf(family, some), tokens, DType::kF32));
    cases.push_back(AdvanceCase(ShapeOf(family, some), 0, tokens, DType::kF32));
    cases.push_back(AdvanceCase(ShapeOf(family, many / 4), 4, 16, DType::kF32));
    cases.push_back(AdvanceCase(ShapeOf(family, many), 0, 1, DType::kF32));
  }
  cases.push_back(ComposeCase({ShapeOf(Family::kKda, many), 16, DType::kF16, TransitionForm::kLowRank, 16}));
  cases.push_back(ComposeCase({ShapeOf(Family::kGdn, many), 16, DType::kF16, TransitionForm::kZero}));
  return cases;
}

}  // namespace ashlar::bench
