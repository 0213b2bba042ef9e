// Independent vectors, computed in fp64 by programs that share no code with this project: every back end reproduces
// them. testdata/README.md says what they hold.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/print.h"

namespace ashlar::kernels {
namespace {

using nlohmann::json;

constexpr char kVectorsPath[] = ASHLAR_KERNELS_DIR "/testdata/vectors.json";

// Inputs are rounded to fp32 before they enter. The bounds are those that back ends have against the reference.
constexpr double kLinearTolerance = 1e-5;
constexpr double kRotationTolerance = 1e-6;

void AppendNumbers(const json& value, std::vector<double>& numbers) {
  if (value.is_number()) return numbers.push_back(value.get<double>());
  for (const json& element : value) AppendNumbers(element, numbers);
}

// All numbers of nested arrays, row-major.
std::vector<double> Numbers(const json& value) {
  std::vector<double> numbers;
  AppendNumbers(value, numbers);
  return numbers;
}

std::vector<float> Floats(const std::vector<double>& numbers) {
  return {numbers.begin(), numbers.end()};
}

std::vector<double> Transposed(const std::vector<double>& matrix, size_t rows) {
  const size_t columns = matrix.size() / rows;
  std::vector<double> out(matrix.size());
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) out[j * rows + i] = matrix[i * columns + j];
  }
  return out;
}

double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

class Vectors : public testing::TestWithParam<const Kernels*> {
 protected:
  void SetUp() override {
    std::ifstream file(kVectorsPath);
    ASSERT_TRUE(file) << kVectorsPath;
    vectors_ = json::parse(file);
  }

  const Kernels& kernels() const { return *GetParam(); }
  Queue& queue() { return *queue_; }
  const json& vectors() const { return vectors_; }

 private:
  std::unique_ptr<Queue> queue_ = GetParam()->MakeQueue(nullptr);
  json vectors_;
};

// ---- Linear layers, family gdn ----------------------------------------------------------------------------------

// One matrix a head, and the pointers that the kernels take.
struct Matrices {
  explicit Matrices(std::vector<std::vector<float>> matrices) : heads(std::move(matrices)) {
    for (std::vector<float>& head : heads) pointers.push_back(head.data());
  }
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;

  std::vector<std::vector<float>> heads;
  std::vector<float*> pointers;
};

// The heads of family gdn side by side as one layer, matrices in one of the two state orders.
class GdnLayer {
 public:
  GdnLayer(const json& vectors, StateOrder order) {
    for (const json& head : vectors["linear"]) {
      if (head["family"] == "gdn") heads_.push_back(&head);
    }
    shape_ = {.heads = static_cast<int32_t>(heads_.size()),
              .key_heads = static_cast<int32_t>(heads_.size()),
              .d_k = First("d_k").get<int32_t>(),
              .d_v = First("d_v").get<int32_t>(),
              .order = order};
    tokens_ = static_cast<int64_t>(First("tokens").size());
    for (const json& segment : First("segments")) lengths_.push_back(segment["tokens"].get<int64_t>());
    for (int64_t t = 0; t < tokens_; ++t) {
      for (const json* head : heads_) {
        const json& token = (*head)["tokens"][t];
        for (double number : Numbers(token["q"])) q_.push_back(static_cast<float>(number));
        for (double number : Numbers(token["k"])) k_.push_back(static_cast<float>(number));
        for (double number : Numbers(token["v"])) v_.push_back(static_cast<float>(number));
        g_.push_back(token["g"].get<float>());
        beta_.push_back(token["beta"].get<float>());
        for (double number : Numbers((*head)["outputs_q_dot_S"][t])) outputs_.push_back(number);
      }
    }
  }

  const LinearShape& shape() const { return shape_; }
  size_t segments() const { return lengths_.size(); }
  int64_t tokens() const { return tokens_; }
  const std::vector<double>& outputs() const { return outputs_; }  // [tokens, heads, d_v]

  int64_t SegmentBegin(size_t segment) const {
    int64_t begin = 0;
    for (size_t i = 0; i < segment; ++i) begin += lengths_[i];
    return begin;
  }
  int64_t SegmentEnd(size_t segment) const { return SegmentBegin(segment) + lengths_[segment]; }

  TokenInputs Inputs(int64_t begin, int64_t end) const {
    const int64_t heads = shape_.heads, keys = heads * shape_.d_k, values = heads * shape_.d_v;
    return {.tokens = end - begin,
            .q = q_.data() + begin * keys,
            .k = k_.data() + begin * keys,
            .v = v_.data() + begin * values,
            .g = g_.data() + begin * heads,
            .beta = beta_.data() + begin * heads,
            .q_stride = keys,
            .k_stride = keys,
            .v_stride = values,
            .g_stride = heads,
            .beta_stride = heads};
  }

  // [d_k, …] as the vectors have it, turned where the layer keeps values first.
  std::vector<double> InOrder(const json& matrix) const {
    const std::vector<double> numbers = Numbers(matrix);
    return shape_.order == StateOrder::kKeyFirst ? numbers : Transposed(numbers, static_cast<size_t>(shape_.d_k));
  }
  std::vector<double> Transition(int32_t head, size_t segment) const {
    return InOrder((*heads_[head])["segments"][segment]["T"]);
  }
  std::vector<double> EndState(int32_t head, size_t segment) const {
    return InOrder((*heads_[head])["segments"][segment]["S"]);
  }
  std::vector<double> FinalState(int32_t head) const { return InOrder((*heads_[head])["final_state"]); }

  Matrices InitialStates() const {
    return ForHeads([&](int32_t h) { return Floats(InOrder((*heads_[h])["initial_state"])); });
  }
  Matrices Transitions(size_t segment) const {
    return ForHeads([&](int32_t h) { return Floats(Transition(h, segment)); });
  }
  Matrices EndStates(size_t segment) const {
    return ForHeads([&](int32_t h) { return Floats(EndState(h, segment)); });
  }
  Matrices Blank(int32_t columns) const {
    return ForHeads([&](int32_t) { return std::vector<float>(shape_.d_k * columns, NAN); });
  }

 private:
  const json& First(const char* field) const { return (*heads_.at(0))[field]; }

  template <typename Fn>
  Matrices ForHeads(Fn fn) const {
    std::vector<std::vector<float>> matrices;
    for (int32_t h = 0; h < shape_.heads; ++h) matrices.push_back(fn(h));
    return Matrices(std::move(matrices));
  }

  LinearShape shape_;
  int64_t tokens_ = 0;
  std::vector<const json*> heads_;
  std::vector<int64_t> lengths_;
  std::vector<float> q_, k_, v_, g_, beta_;
  std::vector<double> outputs_;
};

void ExpectFinalStates(const GdnLayer& layer, const Matrices& states) {
  for (int32_t h = 0; h < layer.shape().heads; ++h) {
    EXPECT_LE(RelativeError(states.heads[h], layer.FinalState(h)), kLinearTolerance) << "head " << h;
  }
}

class GdnVectors : public Vectors {
 protected:
  // Calls test(layer) once for each state order.
  template <typename Fn>
  void ForBothOrders(Fn test) {
    for (StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
      SCOPED_TRACE(order == StateOrder::kKeyFirst ? "key first" : "value first");
      const GdnLayer layer(vectors(), order);
      ASSERT_GE(layer.shape().heads, 2);
      test(layer);
    }
  }
};

TEST_P(GdnVectors, CaptureGivesEachSegmentsTuple) {
  ForBothOrders([&](const GdnLayer& layer) {
    for (size_t i = 0; i < layer.segments(); ++i) {
      Matrices transition = layer.Blank(layer.shape().d_k), state = layer.Blank(layer.shape().d_v);
      const CaptureArgs args{.shape = layer.shape(),
                             .inputs = layer.Inputs(layer.SegmentBegin(i), layer.SegmentEnd(i)),
                             .transition = transition.pointers.data(),
                             .state = state.pointers.data()};
      kernels().Capture(args, queue()).Wait();
      for (int32_t h = 0; h < layer.shape().heads; ++h) {
        EXPECT_LE(RelativeError(transition.heads[h], layer.Transition(h, i)), kLinearTolerance) << i << ", head " << h;
        EXPECT_LE(RelativeError(state.heads[h], layer.EndState(h, i)), kLinearTolerance) << i << ", head " << h;
      }
    }
  });
}

TEST_P(GdnVectors, AdvanceSeamGivesOutputsAndFinalState) {
  ForBothOrders([&](const GdnLayer& layer) {
    Matrices state = layer.InitialStates();
    const int64_t row = int64_t{layer.shape().heads} * layer.shape().d_v;
    std::vector<float> out(layer.tokens() * row, NAN);
    const SeamStep steps[] = {{.begin = 0, .end = layer.tokens()}};
    const AdvanceSeamArgs args{.shape = layer.shape(),
                               .steps = steps,
                               .inputs = layer.Inputs(0, layer.tokens()),
                               .state = state.pointers.data(),
                               .out = out.data(),
                               .out_stride = row};
    kernels().AdvanceSeam(args, queue()).Wait();
    EXPECT_LE(RelativeError(out, layer.outputs()), kLinearTolerance);
    ExpectFinalStates(layer, state);
  });
}

// The middle segment is computed between two cached ones: its outputs and the final state are those of one pass.
TEST_P(GdnVectors, AdvanceSeamBetweenInteriors) {
  ForBothOrders([&](const GdnLayer& layer) {
    ASSERT_EQ(layer.segments(), 3u);
    Matrices state = layer.InitialStates();
    Matrices t0 = layer.Transitions(0), s0 = layer.EndStates(0), t2 = layer.Transitions(2), s2 = layer.EndStates(2);
    const TupleView first{t0.pointers.data(), s0.pointers.data()}, last{t2.pointers.data(), s2.pointers.data()};
    const int64_t begin = layer.SegmentBegin(1), end = layer.SegmentEnd(1);
    const int64_t row = int64_t{layer.shape().heads} * layer.shape().d_v;
    std::vector<float> out(layer.tokens() * row, NAN);
    const SeamStep steps[] = {{.interior = &first}, {.begin = begin, .end = end}, {.interior = &last}};
    const AdvanceSeamArgs args{.shape = layer.shape(),
                               .steps = steps,
                               .inputs = layer.Inputs(0, layer.tokens()),
                               .state = state.pointers.data(),
                               .out = out.data(),
                               .out_stride = row};
    kernels().AdvanceSeam(args, queue()).Wait();
    const std::vector<float> run(out.begin() + begin * row, out.begin() + end * row);
    const std::vector<double> expected(layer.outputs().begin() + begin * row, layer.outputs().begin() + end * row);
    EXPECT_LE(RelativeError(run, expected), kLinearTolerance);
    EXPECT_TRUE(std::isnan(out.front()) && std::isnan(out.back())) << "tokens outside the run have no output";
    ExpectFinalStates(layer, state);
  });
}

TEST_P(GdnVectors, ComposeOfAllSegmentsGivesTheFinalState) {
  ForBothOrders([&](const GdnLayer& layer) {
    ASSERT_EQ(layer.segments(), 3u);
    Matrices t0 = layer.Transitions(0), t1 = layer.Transitions(1), t2 = layer.Transitions(2);
    Matrices s0 = layer.EndStates(0), s1 = layer.EndStates(1), s2 = layer.EndStates(2);
    const TupleView interiors[] = {{t0.pointers.data(), s0.pointers.data()},
                                   {t1.pointers.data(), s1.pointers.data()},
                                   {t2.pointers.data(), s2.pointers.data()}};
    Matrices state = layer.InitialStates();
    kernels().Compose({layer.shape(), interiors, state.pointers.data()}, queue()).Wait();
    ExpectFinalStates(layer, state);

    // The same by way of one tuple for the whole chain.
    Matrices transition = layer.Blank(layer.shape().d_k), end_state = layer.Blank(layer.shape().d_v);
    kernels()
        .ComposeTransitions({layer.shape(), interiors, transition.pointers.data(), end_state.pointers.data()}, queue())
        .Wait();
    const TupleView chain[] = {{transition.pointers.data(), end_state.pointers.data()}};
    Matrices collapsed = layer.InitialStates();
    kernels().Compose({layer.shape(), chain, collapsed.pointers.data()}, queue()).Wait();
    ExpectFinalStates(layer, collapsed);
  });
}

// ---- Rotations --------------------------------------------------------------------------------------------------

class RopeVectors : public Vectors {
 protected:
  struct Case {
    Rotation rotation;
    int32_t dim = 0;
    int64_t rows = 0;
    int64_t start = 0;
    std::vector<float> keys;       // zero-based, [rows, dim]
    std::vector<double> expected;  // at `start`
  };

  // Calls test(case) for every table of the vectors and every start.
  template <typename Fn>
  void ForEachCase(Fn test) {
    int cases = 0;
    for (const json& table : vectors()["rope"]) {
      const std::vector<double> frequencies = Numbers(table["freqs"]);
      const std::string style = table["style"];
      ASSERT_TRUE(style == "half_split" || style == "interleaved") << style;
      for (const json& start : table["starts"]) {
        const std::string position = std::to_string(start.get<int64_t>());
        SCOPED_TRACE(style + ", rotary_dim " + table["rotary_dim"].dump() + ", start " + position);
        test(Case{.rotation = {.style = style == "half_split" ? RopeStyle::kHalfSplit : RopeStyle::kInterleaved,
                               .rotary_dim = table["rotary_dim"],
                               .frequencies = frequencies.data()},
                  .dim = table["dim"],
                  .rows = static_cast<int64_t>(table["zero_based_keys"].size()),
                  .start = start,
                  .keys = Floats(Numbers(table["zero_based_keys"])),
                  .expected = Numbers(table["landed_keys"][position])});
        ++cases;
      }
    }
    EXPECT_GE(cases, 8) << "both styles, full and partial, at two starts";
  }
};

TEST_P(RopeVectors, RotateKeysGivesLandedKeys) {
  ForEachCase([&](const Case& c) {
    std::vector<float> target(c.keys.size(), NAN);
    RotateKeysArgs args{.rotation = c.rotation,
                        .delta = c.start,
                        .rows = c.rows,
                        .dim = c.dim,
                        .source = c.keys.data(),
                        .target = target.data()};
    kernels().RotateKeys(args, queue()).Wait();
    EXPECT_LE(RelativeError(target, c.expected), kRotationTolerance);

    std::vector<float> in_place = c.keys;
    args.source = args.target = in_place.data();
    kernels().RotateKeys(args, queue()).Wait();
    EXPECT_EQ(in_place, target);
  });
}

TEST_P(RopeVectors, LandGivesLandedKeys) {
  ForEachCase([&](const Case& c) {
    // Units of three tokens, pages of two in descending order, landing from the middle of a page.
    constexpr int32_t kUnitTokens = 3, kPageTokens = 2;
    constexpr int64_t kFirst = 1;
    std::vector<const float*> units;
    for (int64_t t = 0; t < c.rows; t += kUnitTokens) units.push_back(c.keys.data() + t * c.dim);
    const int32_t pages = static_cast<int32_t>((kFirst + c.rows + kPageTokens - 1) / kPageTokens);
    std::vector<int32_t> page_table;
    for (int32_t page = pages - 1; page >= 0; --page) page_table.push_back(page);
    std::vector<float> slots(static_cast<size_t>(pages) * kPageTokens * c.dim, NAN);
    const LandArgs args{
        .source = {.units = units.data(), .unit_tokens = kUnitTokens, .tokens = c.rows, .heads = 1, .dim = c.dim},
        .rotation = c.rotation,
        .delta = c.start,
        .target = {.base = slots.data(),
                   .page_stride = int64_t{kPageTokens} * c.dim,
                   .token_stride = c.dim,
                   .head_stride = c.dim,
                   .page_tokens = kPageTokens,
                   .page_table = page_table.data()},
        .first_position = kFirst};
    kernels().Land(args, queue()).Wait();
    std::vector<float> landed;
    for (int64_t p = kFirst; p < kFirst + c.rows; ++p) {
      const float* row = slots.data() + (page_table[p / kPageTokens] * kPageTokens + p % kPageTokens) * c.dim;
      landed.insert(landed.end(), row, row + c.dim);
    }
    EXPECT_LE(RelativeError(landed, c.expected), kRotationTolerance);
    EXPECT_TRUE(std::isnan(slots[int64_t{page_table[0]} * kPageTokens * c.dim])) << "position 0 is not the landing's";
  });
}

INSTANTIATE_TEST_SUITE_P(Every, GdnVectors, testing::ValuesIn(Available().begin(), Available().end()),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Every, RopeVectors, testing::ValuesIn(Available().begin(), Available().end()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::kernels
