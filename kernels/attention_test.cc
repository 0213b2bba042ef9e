// SPDX-License-Identifier: Apache-2.0
// Every back end against the reference, and the three ways to rotate keys against each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/testing/attention_inputs.h"

namespace ashlar::kernels::testing {
namespace {

// The accepted difference between two back ends on the same pages: sums are fp32 for every element type of the pages.
constexpr double kTolerance = 1e-5;
constexpr int64_t kStarts[] = {0, 1000, 1'000'003, 5'123'456'789};
constexpr AttentionKind kKinds[] = {AttentionKind::kGqa, AttentionKind::kMla};

// Properties that every back end must have, including the reference.
class AttentionTest : public ::testing::TestWithParam<Backend> {
 protected:
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{GetParam()};
  Runner reference_{Reference()};
};

// Against the reference.
class AttentionCandidates : public AttentionTest {};

TEST_P(AttentionCandidates, AgreesWithTheReference) {
  for (const RowFormat format : kRowFormats) {
    for (const AttentionKind kind : kKinds) {
      for (const int64_t start : kStarts) {
        const AttentionCase what = RandomCase(random_, kind, format, start);
        const AttentionContext context(random_, what);
        for (const Stand stand : kStands) {
          SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
          EXPECT_LE(LargestError(what.shape, context.Run(runner_, stand), context.Run(reference_, stand)), kTolerance);
        }
      }
    }
  }
}

// ‖a − b‖ / ‖b‖ over all outputs.
double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

// Landed keys were rounded once more than zero-based ones, and those once more than unrotated ones.
TEST_P(AttentionTest, GivesTheSameInAllThreeWays) {
  for (const RowFormat format : kRowFormats) {
    for (const AttentionKind kind : kKinds) {
      for (const int64_t start : kStarts) {
        const AttentionCase what = RandomCase(random_, kind, format, start);
        const AttentionContext context(random_, what);
        const Attended landed = context.Run(runner_, Stand::kLanded);
        const double tolerance = std::max(2 * kTolerance, 4 * UnitRoundoff(format.dtype));
        for (const Stand stand : {Stand::kUnrotated, Stand::kZeroBased}) {
          SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
          EXPECT_LE(RelativeError(context.Run(runner_, stand).out, landed.out), tolerance);
        }
      }
    }
  }
}

// One query over a context long enough to be divided among many threads, and many queries over the same.
TEST_P(AttentionCandidates, AttendsToLongContexts) {
  for (const AttentionKind kind : kKinds) {
    for (const size_t queries : {1, 2, 40}) {
      AttentionCase what = RandomCase(random_, kind, {DType::kBF16}, 1'000'003);
      what.shape.kv_heads = 1;
      what.shape.query_heads = 2;
      what.shape.key_dim = what.shape.value_dim = 16;
      what.rotary_dim = 8;
      what.shape.window = random_.Integer(0, 1) == 0 ? 0 : 2000;
      what.spans = {{700, 5, 0}, {1500, 1'000'000, 999'990}, {900, 1'001'507, 1'001'500}};
      what.queries.clear();
      for (size_t i = 0; i < queries; ++i) what.queries.push_back(1'002'400 + static_cast<int64_t>(i));
      const AttentionContext context(random_, what);
      for (const Stand stand : kStands) {
        SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
        EXPECT_LE(LargestError(what.shape, context.Run(runner_, stand), context.Run(reference_, stand)), kTolerance);
      }
    }
  }
}

TEST_P(AttentionTest, MergesIntoAnEarlierResult) {
  for (const AttentionKind kind : kKinds) {
    for (const int64_t start : kStarts) {
      AttentionCase what = RandomCase(random_, kind, {}, start);
      while (what.spans.size() < 2) what.spans.push_back(what.spans.front());
      const AttentionContext context(random_, what);
      for (const Stand stand : kStands) {
        SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
        const auto cut = static_cast<size_t>(random_.Integer(0, static_cast<int64_t>(what.spans.size())));
        Attended merged = context.Run(runner_, stand, context.Args(stand, 0, cut));
        AttendArgs rest = context.Args(stand, cut);
        rest.out = merged.out.data();
        rest.lse = merged.lse.data();
        rest.merge = true;
        runner_.Run(OperationFor(stand), rest);
        EXPECT_LE(LargestError(what.shape, merged, context.Run(runner_, stand)), 2 * kTolerance);
      }
    }
  }
}

// A query before all keys, one whose window ends before the first, and no keys at all.
TEST_P(AttentionTest, QueriesThatSeeNothingGetZeros) {
  for (const AttentionKind kind : kKinds) {
    AttentionCase what = RandomCase(random_, kind, {}, 100);
    what.shape.window = 50;
    what.spans = {{40, 100, 90}, {0, 140, 140}};
    what.queries = {99, 120, 189};
    const AttentionContext context(random_, what);
    for (const Stand stand : kStands) {
      const Attended seen = context.Run(runner_, stand), nothing = context.Run(runner_, stand, context.Args(stand, 1));
      const auto heads = static_cast<size_t>(what.shape.query_heads);
      const auto width = heads * static_cast<size_t>(what.shape.OutDim());
      const auto zero = [](float x) { return x == 0; };
      for (size_t head = 0; head < heads; ++head) {
        EXPECT_EQ(seen.lse[head], -INFINITY);
        EXPECT_TRUE(std::isfinite(seen.lse[heads + head]));
        EXPECT_EQ(seen.lse[2 * heads + head], -INFINITY);
      }
      EXPECT_TRUE(std::all_of(seen.out.begin(), seen.out.begin() + width, zero));
      EXPECT_TRUE(std::none_of(seen.out.begin() + width, seen.out.begin() + 2 * width, zero));
      EXPECT_TRUE(std::all_of(seen.out.begin() + 2 * width, seen.out.end(), zero));
      EXPECT_TRUE(std::ranges::all_of(nothing.out, zero));
      EXPECT_TRUE(std::ranges::all_of(nothing.lse, [](float x) { return x == -INFINITY; }));
    }
  }
}

// Scores far apart and far from zero: the softmax scales by the scores that it has seen.
TEST_P(AttentionCandidates, TakesScoresOfAnySize) {
  AttentionCase what = RandomCase(random_, AttentionKind::kGqa, {}, 0);
  what.shape.scale = 30;
  what.shape.window = 0;
  what.spans = {{400, 0, 0}};
  what.queries = {400};
  const AttentionContext context(random_, what);
  for (const Stand stand : kStands) {
    const Attended result = context.Run(runner_, stand), expected = context.Run(reference_, stand);
    EXPECT_TRUE(std::ranges::all_of(result.out, [](float x) { return std::isfinite(x); }));
    for (size_t i = 0; i < result.lse.size(); ++i) {
      EXPECT_NEAR(result.lse[i], expected.lse[i], 1e-5 * std::abs(expected.lse[i])) << NameOf(stand);
    }
  }
}

// The largest dimensions, as in a latent model. Outputs are so wide that none is nearly zero by chance.
TEST_P(AttentionCandidates, AgreesAtTheLargestDims) {
  struct Dims {
    AttentionKind kind;
    int32_t key, value;
  };
  for (const Dims dims : {Dims{AttentionKind::kGqa, kMaxQueryDim, kMaxQueryDim},
                          {AttentionKind::kGqa, 1, 16},
                          {AttentionKind::kGqa, kMaxQueryDim - 2, 18},
                          {AttentionKind::kMla, 512, 64},
                          {AttentionKind::kMla, 1000, 24},
                          {AttentionKind::kMla, 18, 1006}}) {
    for (const RowFormat format : {RowFormat{DType::kF32}, RowFormat{DType::kF8E4M3, true}}) {
      AttentionCase what = RandomCase(random_, dims.kind, format, 1000);
      what.shape.key_dim = dims.key;
      what.shape.value_dim = dims.value;
      what.shape.scale = 1 / std::sqrt(static_cast<float>(what.shape.QueryDim()));
      const int32_t turned = dims.kind == AttentionKind::kMla ? dims.value : dims.key;
      what.rotary_dim = turned / 2 * 2;
      what.style = turned < 2 ? RopeStyle::kNone : RopeStyle::kInterleaved;
      const AttentionContext context(random_, what);
      for (const Stand stand : kStands) {
        SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
        EXPECT_LE(LargestError(what.shape, context.Run(runner_, stand), context.Run(reference_, stand)), kTolerance);
      }
    }
  }
}

// Sets one number of a random row of a plane to NaN.
void SpoilRow(Random& random, const KeySpan& span, const PagedSlots& slots, int32_t heads, int32_t dim) {
  const int64_t slot = span.first_slot + random.Integer(0, span.tokens - 1);
  WriteElement(slots.dtype, slots.base,
               slots.page_table[slot / slots.page_tokens] * slots.page_stride +
                   slot % slots.page_tokens * slots.token_stride + random.Integer(0, heads - 1) * slots.head_stride +
                   random.Integer(0, dim - 1),
               NAN);
}

// One number of a query, or of a visible key or value, is NaN, as a corrupt number may be. It must not be skipped like
// an invisible key. Outputs that do not depend on it must be right.
TEST_P(AttentionCandidates, NanInGivesNanOut) {
  enum class Where { kQuery, kKey, kValue };
  for (const Where where : {Where::kQuery, Where::kKey, Where::kValue}) {
    for (const AttentionKind kind : kKinds) {
      AttentionCase what = RandomCase(random_, kind, {}, 100);
      what.shape.window = 0;
      const int64_t tokens = random_.Integer(0, 1) == 0 ? 1 : random_.Integer(2, 700);
      what.spans = {{tokens, 100, 100}};
      what.queries = {100 + tokens, 107 + tokens};
      const AttentionContext context(random_, what);
      for (const Stand stand : kStands) {
        SCOPED_TRACE(NameOf(stand) + ", " + Describe(what) + ", where " + std::to_string(static_cast<int>(where)));
        const KeySpan span = context.Spans(stand)[0];
        if (where == Where::kKey) SpoilRow(random_, span, span.keys, what.shape.kv_heads, what.shape.key_dim);
        if (where == Where::kValue) SpoilRow(random_, span, span.values, what.shape.kv_heads, what.shape.value_dim);
        AttendArgs args = context.Args(stand);
        std::vector<float> queries(args.q, args.q + args.tokens * args.q_stride);
        if (where == Where::kQuery) queries[random_.Integer(0, static_cast<int64_t>(queries.size()) - 1)] = NAN;
        args.q = queries.data();
        const Attended actual = context.Run(runner_, stand, args), expected = context.Run(reference_, stand, args);
        EXPECT_TRUE(std::ranges::any_of(expected.out, [](float x) { return std::isnan(x); }));
        for (size_t i = 0; i < expected.out.size(); ++i) {
          ASSERT_EQ(std::isnan(actual.out[i]), std::isnan(expected.out[i])) << "output " << i;
          if (std::isnan(expected.out[i])) continue;
          ASSERT_NEAR(actual.out[i], expected.out[i], 1e-4) << "output " << i;
        }
        for (size_t i = 0; i < expected.lse.size(); ++i) {
          ASSERT_EQ(std::isnan(actual.lse[i]), std::isnan(expected.lse[i])) << "lse " << i;
        }
      }
    }
  }
}

// Wrong ways to attend, each distinguished from the right one by the bounds above.
class AttentionFaults : public ::testing::Test {
 protected:
  AttentionFaults() {
    what_.shape.window = 0;
    what_.shape.kv_heads = 2;
    what_.shape.query_heads = 4;
    what_.style = RopeStyle::kHalfSplit;
    what_.shape.key_dim = what_.shape.value_dim = what_.rotary_dim = 64;
    what_.rope_scale = 1.25f;
    what_.spans = {{50, 3, 0}, {60, 1'000'003, 1'000'000}};
    what_.queries = {1'000'100};
  }

  static constexpr double kVisible = 100 * kTolerance;
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner reference_{Reference()};
  AttentionCase what_ = RandomCase(random_, AttentionKind::kGqa, {}, 0);
};

TEST_F(AttentionFaults, OfRotationAreVisible) {
  const AttentionContext context(random_, what_);
  for (const Stand stand : kStands) {
    SCOPED_TRACE(NameOf(stand));
    const Attended right = context.Run(reference_, stand);
    const auto error = [&](const AttendArgs& args) {
      return LargestError(what_.shape, context.Run(reference_, stand, args), right);
    };
    AttendArgs args = context.Args(stand);
    const std::vector<double> wrong_base = Frequencies(what_.rotary_dim, 1e4);
    args.rotation.frequencies = wrong_base.data();
    EXPECT_GT(error(args), kVisible) << "wrong base";
    args = context.Args(stand);
    args.rotation.style = RopeStyle::kInterleaved;
    EXPECT_GT(error(args), kVisible) << "wrong pairs";
    args = context.Args(stand);
    args.rotation.scale = 1;
    EXPECT_GT(error(args), kVisible) << "scale left out";
    args = context.Args(stand);
    std::vector<double> rounded = context.frequencies();
    for (double& f : rounded) f = 1'000'100.0f * static_cast<float>(f) / 1'000'100.0;
    args.rotation.frequencies = rounded.data();
    EXPECT_GT(error(args), kVisible) << "angles in fp32";
    // Reading keys as if they were stored in another form gives a visible error.
    for (const Stand other : kStands) {
      if (other == stand) continue;
      AttendArgs mistaken = context.Args(stand);
      EXPECT_GT(LargestError(what_.shape, context.Run(reference_, other, mistaken), right), kVisible) << NameOf(other);
    }
  }
}

TEST_F(AttentionFaults, OfPlaceAreVisible) {
  const AttentionContext context(random_, what_);
  std::vector<KeySpan> spans = context.Spans(Stand::kZeroBased);
  const auto error = [&](Stand stand) {
    AttendArgs args = context.Args(stand);
    args.spans = spans;
    return LargestError(what_.shape, context.Run(reference_, stand, args), context.Run(reference_, stand));
  };
  ++spans[1].origin;
  EXPECT_GT(error(Stand::kZeroBased), kVisible) << "a span's origin is off by one";
  spans = context.Spans(Stand::kUnrotated);
  --spans[1].position;
  EXPECT_GT(error(Stand::kUnrotated), kVisible) << "a span's position is off by one";
  spans = context.Spans(Stand::kLanded);
  spans[1].first_slot += 10;
  spans[1].tokens -= 10;
  EXPECT_GT(error(Stand::kLanded), kVisible) << "keys are left out";
}

TEST_F(AttentionFaults, OfMergingAreVisible) {
  const AttentionContext context(random_, what_);
  const Attended right = context.Run(reference_, Stand::kLanded);
  const Attended a = context.Run(reference_, Stand::kLanded, context.Args(Stand::kLanded, 0, 1));
  Attended b = context.Run(reference_, Stand::kLanded, context.Args(Stand::kLanded, 1, 1));
  for (size_t i = 0; i < b.out.size(); ++i) b.out[i] = (a.out[i] + b.out[i]) / 2;
  b.lse = right.lse;
  EXPECT_GT(LargestError(what_.shape, b, right), kVisible) << "parts are averaged, whatever their lse";
}

// Without a candidate there is nothing to compare with the reference.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionCandidates);
INSTANTIATE_TEST_SUITE_P(Candidates, AttentionCandidates, ::testing::ValuesIn(Candidates()),
                         ::testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Backends, AttentionTest, ::testing::ValuesIn(Backends()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::kernels::testing
