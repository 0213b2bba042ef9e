// Every back end against the reference: turning keys, landing rows in pages and gathering them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/checksum.h"
#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"

namespace ashlar::kernels::testing {
namespace {

// Entries lie in [−2, 2], so a turned one is at most 2√2 in size: cos, sin, two products and a sum, each rounded once
// in fp32, differ from the truth by less than this.
constexpr float kRotationTolerance = 1e-6f;
constexpr int64_t kStarts[] = {0, 1, 17, 4096, 1'000'003, 5'123'456'789};

class RowsTest : public ::testing::TestWithParam<Backend> {
 protected:
  Rotation RandomRotation(int32_t dim) {
    const auto style =
        std::array{RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}[random_.Integer(0, 2)];
    return MakeRotation(style, 2 * static_cast<int32_t>(random_.Integer(1, dim / 2)));
  }
  Rotation MakeRotation(RopeStyle style, int32_t rotary_dim) {
    frequencies_ = Frequencies(rotary_dim, 1e6);
    return {.style = style, .rotary_dim = rotary_dim, .frequencies = frequencies_.data()};
  }

  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{GetParam()};
  Runner reference_{Reference()};
  std::vector<double> frequencies_;
};

std::string Describe(const RowsShape& shape, const Rotation& rotation) {
  return std::to_string(shape.tokens) + " tokens in units of " + std::to_string(shape.unit_tokens) + ", heads " +
         std::to_string(shape.heads) + ", dim " + std::to_string(shape.dim) + ", style " +
         std::to_string(static_cast<int>(rotation.style)) + ", rotary " + std::to_string(rotation.rotary_dim);
}

float LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::abs(a[i] - b[i]);
    largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
  }
  return largest;
}

std::vector<uint64_t> ChecksumsOf(const Units& units) {
  std::vector<uint64_t> checksums;
  for (const std::vector<float>& unit : units.values()) {
    checksums.push_back(UnitChecksum(unit.data(), unit.size() * sizeof(float)));
  }
  return checksums;
}

TEST_P(RowsTest, TurnsKeys) {
  for (const RopeStyle style : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    for (const int64_t delta : kStarts) {
      const auto dim = static_cast<int32_t>(random_.Integer(2, 130));
      const int64_t rows = random_.Integer(0, 40);
      for (const int32_t rotary_dim : {dim / 2 * 2, 2 * static_cast<int32_t>(random_.Integer(1, dim / 2))}) {
        const Rotation rotation = MakeRotation(style, rotary_dim);
        SCOPED_TRACE(Describe({.tokens = rows, .dim = dim}, rotation) + ", delta " + std::to_string(delta));
        const std::vector<float> source = random_.Uniforms(rows * dim, -2, 2);
        std::vector<float> target(source.size()), expected(source.size()), in_place = source;
        RotateKeysArgs args = {.rotation = rotation,
                               .delta = delta,
                               .rows = rows,
                               .dim = dim,
                               .source = source.data(),
                               .target = expected.data()};
        reference_.Run(args);
        args.target = target.data();
        runner_.Run(args);
        EXPECT_LE(LargestDifference(target, expected), style == RopeStyle::kNone ? 0 : kRotationTolerance);
        args.source = args.target = in_place.data();
        runner_.Run(args);
        EXPECT_EQ(LargestDifference(in_place, target), 0);
        // And back again.
        args.delta = -delta;
        runner_.Run(args);
        EXPECT_LE(LargestDifference(in_place, source), style == RopeStyle::kNone ? 0 : 2 * kRotationTolerance);
      }
    }
  }
}

TEST_P(RowsTest, LandsInRandomPages) {
  for (const PageOrder order : {PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}) {
    for (const int64_t first_position : {int64_t{0}, int64_t{1}, int64_t{33}, int64_t{1'000'003}}) {
      for (const bool misaligned : {false, true}) {
        const RowsShape shape = RandomRowsShape(random_);
        const Rotation rotation = RandomRotation(shape.dim);
        SCOPED_TRACE(Describe(shape, rotation) + ", position " + std::to_string(first_position));
        const Units units(shape, random_);
        Pages pages(random_, shape, order, static_cast<int32_t>(random_.Integer(1, 40)), first_position, misaligned);
        std::vector<float> expected = pages.values();
        std::vector<uint64_t> checksums(shape.Units());
        LandArgs args = {.source = units.View(),
                         .rotation = rotation,
                         .delta = first_position,
                         .target = pages.ViewOf(expected),
                         .first_position = first_position};
        reference_.Run(args);
        args.batch_bytes = random_.Integer(0, 1) << 30;  // the ways of large transfers are right for small calls too
        args.target = pages.View();
        args.unit_checksums = checksums.data();
        runner_.Run(args);
        // The whole pool is compared: what does not belong to the tokens is untouched.
        EXPECT_LE(LargestDifference(pages.values(), expected),
                  rotation.style == RopeStyle::kNone ? 0 : kRotationTolerance);
        EXPECT_EQ(checksums, ChecksumsOf(units));

        std::ranges::fill(pages.values(), Pages::kUntouched);
        args.unit_checksums = nullptr;
        runner_.Run(args);
        EXPECT_LE(LargestDifference(pages.values(), expected),
                  rotation.style == RopeStyle::kNone ? 0 : kRotationTolerance);
      }
    }
  }
}

TEST_P(RowsTest, GathersFromRandomPages) {
  for (const PageOrder order : {PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}) {
    for (const bool misaligned : {false, true}) {
      const RowsShape shape = RandomRowsShape(random_);
      SCOPED_TRACE(Describe(shape, {}));
      const int64_t first_position = random_.Integer(0, 50);
      Pages pages(random_, shape, order, static_cast<int32_t>(random_.Integer(1, 40)), first_position, misaligned);
      pages.FillRandomly(random_);
      Units units(shape, -1.0f), expected(shape, -1.0f);
      std::vector<uint64_t> checksums(shape.Units());
      GatherArgs args = {.source = pages.View(),
                         .first_position = first_position,
                         .units = expected.pointers(),
                         .unit_tokens = shape.unit_tokens,
                         .tokens = shape.tokens,
                         .heads = shape.heads,
                         .dim = shape.dim};
      reference_.Run(args);
      args.batch_bytes = random_.Integer(0, 1) << 30;
      args.units = units.pointers();
      runner_.Run(args);
      EXPECT_EQ(units.values(), expected.values());
      args.unit_checksums = checksums.data();
      runner_.Run(args);
      EXPECT_EQ(units.values(), expected.values());
      EXPECT_EQ(checksums, ChecksumsOf(units));
    }
  }
}

TEST_P(RowsTest, LandingWhatWasGatheredChangesNothing) {
  for (const PageOrder order : {PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}) {
    const RowsShape shape = RandomRowsShape(random_);
    const int64_t first_position = random_.Integer(0, 50);
    Pages pages(random_, shape, order, static_cast<int32_t>(random_.Integer(1, 40)), first_position);
    const Units units(shape, random_);
    Units gathered(shape, 0.0f);
    std::vector<uint64_t> landed_checksums(shape.Units()), gathered_checksums(shape.Units());
    runner_.Run(LandArgs{.source = units.View(),
                         .target = pages.View(),
                         .first_position = first_position,
                         .unit_checksums = landed_checksums.data()});
    runner_.Run(GatherArgs{.source = pages.View(),
                           .first_position = first_position,
                           .units = gathered.pointers(),
                           .unit_tokens = shape.unit_tokens,
                           .tokens = shape.tokens,
                           .heads = shape.heads,
                           .dim = shape.dim,
                           .unit_checksums = gathered_checksums.data()});
    EXPECT_EQ(gathered.values(), units.values());
    EXPECT_EQ(gathered_checksums, landed_checksums);
  }
}

// Landings of several megabytes may take another way to memory than small ones.
TEST_P(RowsTest, LandsAndGathersMegabytes) {
  for (const bool misaligned : {false, true}) {
    const RowsShape shape = {.tokens = 2100, .unit_tokens = 128, .heads = 2, .dim = 256};
    const Units units(shape, random_);
    Pages pages(random_, shape, PageOrder::kTokensFirst, 48, 5, misaligned);
    std::vector<float> expected = pages.values();
    std::vector<uint64_t> checksums(shape.Units());
    LandArgs args = {.source = units.View(),
                     .rotation = MakeRotation(RopeStyle::kHalfSplit, 64),
                     .delta = 5,
                     .target = pages.ViewOf(expected),
                     .first_position = 5};
    reference_.Run(args);
    args.target = pages.View();
    args.unit_checksums = checksums.data();
    runner_.Run(args);
    EXPECT_LE(LargestDifference(pages.values(), expected), kRotationTolerance);
    EXPECT_EQ(checksums, ChecksumsOf(units));

    args.rotation = {};
    runner_.Run(args);
    Units gathered(shape, 0.0f);
    std::ranges::fill(checksums, 0);
    runner_.Run(GatherArgs{.source = pages.View(),
                           .first_position = 5,
                           .units = gathered.pointers(),
                           .unit_tokens = shape.unit_tokens,
                           .tokens = shape.tokens,
                           .heads = shape.heads,
                           .dim = shape.dim,
                           .unit_checksums = checksums.data()});
    EXPECT_EQ(gathered.values(), units.values());
    EXPECT_EQ(checksums, ChecksumsOf(units));
  }
}

TEST_P(RowsTest, NothingToLandTouchesNothing) {
  const RowsShape shape = {.tokens = 3, .unit_tokens = 2, .heads = 1, .dim = 4};
  Pages pages(random_, shape, PageOrder::kTokensFirst, 2, 0);
  runner_.Run(LandArgs{.source = {.unit_tokens = 2, .heads = 1, .dim = 4}, .target = pages.View()});
  EXPECT_TRUE(std::ranges::all_of(pages.values(), [](float x) { return x == Pages::kUntouched; }));
}

// Ways to turn a key wrongly, each to be told from the right one by the tests above.
TEST(RotationFaults, AreVisible) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const int32_t dim = 64;
  const int64_t rows = 4, start = 1'000'003;
  const std::vector<float> source = random.Uniforms(rows * dim, -2, 2);
  const std::vector<double> right = Frequencies(dim, 1e6), wrong = Frequencies(dim, 1e4);
  const auto turn = [&](RopeStyle style, int32_t rotary_dim, const std::vector<double>& frequencies, int64_t delta) {
    std::vector<float> target(source.size());
    Runner(Reference())
        .Run(RotateKeysArgs{.rotation = {style, rotary_dim, frequencies.data()},
                            .delta = delta,
                            .rows = rows,
                            .dim = dim,
                            .source = source.data(),
                            .target = target.data()});
    return target;
  };
  const std::vector<float> expected = turn(RopeStyle::kHalfSplit, dim, right, start);
  constexpr float kVisible = 1000 * kRotationTolerance;
  EXPECT_GT(LargestDifference(turn(RopeStyle::kHalfSplit, dim, wrong, start), expected), kVisible) << "wrong base";
  EXPECT_GT(LargestDifference(turn(RopeStyle::kInterleaved, dim, right, start), expected), kVisible) << "wrong pairs";
  EXPECT_GT(LargestDifference(turn(RopeStyle::kHalfSplit, dim / 2, right, start), expected), kVisible) << "partly";
  EXPECT_GT(LargestDifference(turn(RopeStyle::kHalfSplit, dim, right, -start), expected), kVisible) << "backwards";
  EXPECT_GT(LargestDifference(turn(RopeStyle::kHalfSplit, dim, right, start - 1), expected), kVisible) << "one off";
  // Angles formed in fp32.
  std::vector<double> rounded(right.size());
  std::ranges::transform(right, rounded.begin(),
                         [&](double f) { return static_cast<float>(start) * static_cast<float>(f) / double{start}; });
  EXPECT_GT(LargestDifference(turn(RopeStyle::kHalfSplit, dim, rounded, start), expected), kVisible) << "fp32 angles";
}

INSTANTIATE_TEST_SUITE_P(Backends, RowsTest, ::testing::ValuesIn(Backends()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::kernels::testing
