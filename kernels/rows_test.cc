// SPDX-License-Identifier: Apache-2.0
// Every back end against the reference: rotating keys, landing rows in pages and gathering them, in every element type.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"

namespace ashlar::kernels::testing {
namespace {

// Entries are in [−2, 2], so a rotated one is at most 2√2: cos, sin, two products and a sum, each rounded once in fp32,
// have a smaller error than this. Narrower types add one rounding.
constexpr double kRotationTolerance = 1e-6;
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
  Rows Turn(Runner& runner, const Rotation& rotation, int64_t delta, const Rows& source) {
    Rows target(source.format, source.rows, source.dim);
    runner.Run(ArgsFor(rotation, delta, source, target));
    return target;
  }
  static RotateKeysArgs ArgsFor(const Rotation& rotation, int64_t delta, const Rows& source, Rows& target) {
    return {.rotation = rotation,
            .delta = delta,
            .rows = source.rows,
            .dim = source.dim,
            .dtype = source.format.dtype,
            .source = source.bytes.data(),
            .target = target.bytes.data(),
            .source_scales = source.format.scaled ? source.scales.data() : nullptr,
            .target_scales = source.format.scaled ? target.scales.data() : nullptr};
  }

  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{GetParam()};
  Runner reference_{Reference()};
  std::vector<double> frequencies_;
};

std::string Describe(const RowsShape& shape, const Rotation& rotation) {
  return shape.format.Name() + ", " + std::to_string(shape.tokens) + " tokens in units of " +
         std::to_string(shape.unit_tokens) + ", heads " + std::to_string(shape.heads) + ", dim " +
         std::to_string(shape.dim) + ", style " + std::to_string(static_cast<int>(rotation.style)) + ", rotary " +
         std::to_string(rotation.rotary_dim);
}

// Expects every number of `target` to be the fp64 result, rounded once.
void ExpectTurned(const Rotation& rotation, int64_t delta, const Rows& source, const Rows& target) {
  for (int64_t row = 0; row < source.rows; ++row) {
    std::vector<double> key(source.dim);
    for (int32_t i = 0; i < source.dim; ++i) key[i] = source.Value(row, i);
    TurnExactly(rotation, delta, key);
    for (int32_t i = 0; i < source.dim; ++i) {
      ASSERT_NEAR(target.Value(row, i), key[i], target.format.Rounding(key[i], target.Scale(row)) + kRotationTolerance)
          << "row " << row << ", dimension " << i;
    }
  }
}

TEST_P(RowsTest, TurnsKeys) {
  for (const RowFormat format : kRowFormats) {
    for (const RopeStyle style : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      for (const int64_t delta : kStarts) {
        const auto dim = static_cast<int32_t>(random_.Integer(2, 130));
        const int64_t rows = random_.Integer(0, 40);
        for (const int32_t rotary_dim : {dim / 2 * 2, 2 * static_cast<int32_t>(random_.Integer(1, dim / 2))}) {
          const Rotation rotation = MakeRotation(style, rotary_dim);
          SCOPED_TRACE(Describe({.tokens = rows, .dim = dim, .format = format}, rotation) + ", delta " +
                       std::to_string(delta));
          const Rows source(format, rows, dim, random_);
          const Rows target = Turn(runner_, rotation, delta, source);
          const bool turns = style != RopeStyle::kNone && delta != 0;
          if (turns) {
            ExpectTurned(rotation, delta, source, target);
          } else {
            EXPECT_TRUE(target == source);
          }
          EXPECT_LE(LargestDifference(target, Turn(reference_, rotation, delta, source), kRotationTolerance), 1);
          Rows in_place = source;
          runner_.Run(ArgsFor(rotation, delta, in_place, in_place));
          EXPECT_TRUE(in_place == target);
          if (turns) ExpectTurned(rotation, -delta, target, Turn(runner_, rotation, -delta, target));
        }
      }
    }
  }
}

TEST_P(RowsTest, TurnsKeysEachByItsOwnPosition) {
  if (GetParam().kernels->memory() != nullptr) GTEST_SKIP() << "refused on a device";
  for (const RowFormat format : kRowFormats) {
    for (const RopeStyle style : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      for (const float scale : {1.0f, 1.25f}) {
        const auto dim = static_cast<int32_t>(random_.Integer(2, 130));
        const int64_t tokens = random_.Integer(0, 12), heads = random_.Integer(1, 5), delta = random_.Integer(0, 9);
        Rotation rotation = MakeRotation(style, 2 * static_cast<int32_t>(random_.Integer(1, dim / 2)));
        rotation.scale = scale;
        std::vector<int64_t> positions;
        for (int64_t t = 0; t < tokens; ++t) positions.push_back(random_.Integer(0, 3) * random_.Integer(0, 1 << 20));
        const Rows source(format, tokens * heads, dim, random_);
        SCOPED_TRACE(Describe({.tokens = tokens, .dim = dim, .format = format}, rotation));
        const auto turn = [&](Runner& runner, Rows& from, Rows& to) {
          RotateKeysArgs args = ArgsFor(rotation, delta, from, to);
          args.positions = positions.data();
          args.rows_per_position = heads;
          args.scaled = true;
          runner.Run(args);
        };
        Rows from = source, target(format, source.rows, dim), expected(format, source.rows, dim), in_place = source;
        turn(runner_, from, target);
        turn(reference_, from, expected);
        turn(runner_, in_place, in_place);
        EXPECT_LE(LargestDifference(target, expected, scale * kRotationTolerance), 1);
        EXPECT_TRUE(in_place == target);
        if (style == RopeStyle::kNone) {
          EXPECT_TRUE(target == source);
        }
        // The reference compared with one fp64 rotation per row.
        for (int64_t row = 0; style != RopeStyle::kNone && !format.scaled && row < source.rows; ++row) {
          std::vector<double> key(dim);
          for (int32_t i = 0; i < dim; ++i) key[i] = source.Value(row, i);
          TurnExactly(rotation, delta + positions[row / heads], key);
          const double limit = ElementBytes(format.dtype) == 1 ? LargestFinite(format.dtype) : INFINITY;
          for (int32_t i = 0; i < dim; ++i) {
            const double exact = std::clamp(key[i] * (i < rotation.rotary_dim ? scale : 1.0), -limit, limit);
            ASSERT_NEAR(expected.Value(row, i), exact,
                        format.Rounding(exact, expected.Scale(row)) + 2 * kRotationTolerance)
                << "row " << row << ", dimension " << i;
          }
        }
      }
    }
  }
}

// The largest magnitude of a rotated row is the type's largest number; a row of zeros keeps its scale.
TEST_P(RowsTest, GivesTurnedRowsTheScaleThatFits) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2}) {
    const Rotation rotation = MakeRotation(RopeStyle::kHalfSplit, 32);
    Rows source({dtype, true}, 20, 50, random_);
    for (int32_t i = 0; i < source.dim; ++i) WriteElement(dtype, source.bytes.data(), i, 0);
    source.scales[0] = 1e6f;
    const Rows target = Turn(runner_, rotation, 4711, source);
    EXPECT_EQ(target.scales[0], source.scales[0]);
    for (int64_t row = 0; row < source.rows; ++row) {
      float largest = 0;
      for (int32_t i = 0; i < source.dim; ++i) {
        largest = std::max(largest, std::abs(ReadElement(dtype, target.bytes.data(), row * source.dim + i)));
      }
      EXPECT_EQ(largest, row == 0 ? 0 : LargestFinite(dtype)) << "row " << row;
    }
  }
}

TEST_P(RowsTest, KeysWithoutScalesSaturate) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2}) {
    for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      Rotation rotation = MakeRotation(style, 2);
      frequencies_ = {std::atan(1.0)};  // to (x − y, x + y) / √2
      rotation.frequencies = frequencies_.data();
      Rows source({dtype}, 1, 2);
      for (int32_t i = 0; i < 2; ++i) WriteElement(dtype, source.bytes.data(), i, -LargestFinite(dtype));
      EXPECT_EQ(Turn(runner_, rotation, 1, source).Value(0, 1), -LargestFinite(dtype));
    }
  }
}

// A rotation by an angle of zero passes every number through fp32 and back.
TEST_P(RowsTest, EveryNumberSurvivesConversion) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2}) {
    frequencies_.assign(32, 0.0);
    const auto patterns = ElementBytes(dtype) == 2 ? 65536 : 256;
    Rows source({dtype}, patterns / 64, 64);
    for (int32_t bits = 0; bits < patterns; ++bits) {
      source.bytes[bits * ElementBytes(dtype)] = static_cast<std::byte>(bits & 255);
      if (patterns > 256) source.bytes[bits * 2 + 1] = static_cast<std::byte>(bits >> 8);
      // Infinity times zero is no number.
      if (!std::isfinite(source.Value(bits / 64, bits % 64))) WriteElement(dtype, source.bytes.data(), bits, 1);
    }
    for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      const Rows target =
          Turn(runner_, {.style = style, .rotary_dim = 64, .frequencies = frequencies_.data()}, 1, source);
      for (int32_t i = 0; i < patterns; ++i) {
        ASSERT_EQ(target.Value(i / 64, i % 64), source.Value(i / 64, i % 64)) << target.format.Name() << " bits " << i;
      }
    }
  }
}

TEST_P(RowsTest, LandsInRandomPages) {
  for (const RowFormat format : kRowFormats) {
    for (const PageOrder order : {PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}) {
      for (const int64_t first_position : {int64_t{0}, int64_t{33}, int64_t{1'000'003}}) {
        for (const bool misaligned : {false, true}) {
          const RowsShape shape = RandomRowsShape(random_, format);
          const Rotation rotation = RandomRotation(shape.dim);
          SCOPED_TRACE(Describe(shape, rotation) + ", position " + std::to_string(first_position));
          const Units units(shape, random_);
          Pages pages(random_, shape, order, static_cast<int32_t>(random_.Integer(1, 40)), first_position, misaligned);
          Pages::Memory expected = pages.memory();
          const Pages::Memory untouched = pages.memory();
          std::vector<uint64_t> checksums(shape.Units()), scale_checksums(shape.Units());
          LandArgs args = {.source = units.View(),
                           .rotation = rotation,
                           .delta = first_position,
                           .target = pages.ViewOf(expected),
                           .first_position = first_position};
          reference_.Run(args);
          for (const bool hash : {true, false}) {
            pages.memory() = untouched;
            args.batch_bytes = random_.Integer(0, 1) << 30;  // the code for large transfers also works for small ones
            args.target = pages.View();
            args.unit_checksums = hash ? checksums.data() : nullptr;
            args.scale_checksums = hash && format.scaled ? scale_checksums.data() : nullptr;
            runner_.Run(args);
            EXPECT_LE(LargestDifference(pages.RowsOf(pages.memory()), pages.RowsOf(expected),
                                        rotation.style == RopeStyle::kNone ? 1e-30 : kRotationTolerance),
                      1);
            if (rotation.style == RopeStyle::kNone || first_position == 0) {
              EXPECT_TRUE(pages.memory() == expected);
            }
            EXPECT_TRUE(pages.SameElsewhere(pages.memory(), untouched)) << "something else was written";
          }
          EXPECT_EQ(checksums, units.Checksums());
          if (format.scaled) {
            EXPECT_EQ(scale_checksums, units.ScaleChecksums());
          }
        }
      }
    }
  }
}

TEST_P(RowsTest, GathersFromRandomPages) {
  for (const RowFormat format : kRowFormats) {
    for (const PageOrder order : {PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}) {
      for (const bool misaligned : {false, true}) {
        const RowsShape shape = RandomRowsShape(random_, format);
        SCOPED_TRACE(Describe(shape, {}));
        const int64_t first_position = random_.Integer(0, 50);
        Pages pages(random_, shape, order, static_cast<int32_t>(random_.Integer(1, 40)), first_position, misaligned);
        pages.SetRows(pages.memory(), Rows(format, shape.tokens * shape.heads, shape.dim, random_));
        Units units(shape), hashed(shape), expected(shape);
        std::vector<uint64_t> checksums(shape.Units()), scale_checksums(shape.Units());
        const auto args = [&](Units& to) {
          return GatherArgs{.source = pages.View(),
                            .first_position = first_position,
                            .units = to.pointers(),
                            .scales = to.scales(),
                            .unit_tokens = shape.unit_tokens,
                            .tokens = shape.tokens,
                            .heads = shape.heads,
                            .dim = shape.dim,
                            .batch_bytes = random_.Integer(0, 1) << 30};
        };
        reference_.Run(args(expected));
        runner_.Run(args(units));
        EXPECT_TRUE(units.values() == expected.values());
        GatherArgs hashing = args(hashed);
        hashing.unit_checksums = checksums.data();
        hashing.scale_checksums = format.scaled ? scale_checksums.data() : nullptr;
        runner_.Run(hashing);
        EXPECT_TRUE(hashed.values() == expected.values());
        EXPECT_EQ(checksums, expected.Checksums());
        if (format.scaled) {
          EXPECT_EQ(scale_checksums, expected.ScaleChecksums());
        }
      }
    }
  }
}

TEST_P(RowsTest, LandingWhatWasGatheredChangesNothing) {
  for (const RowFormat format : kRowFormats) {
    const RowsShape shape = RandomRowsShape(random_, format);
    SCOPED_TRACE(Describe(shape, {}));
    const int64_t first_position = random_.Integer(0, 50);
    Pages pages(random_, shape, PageOrder::kLoose, static_cast<int32_t>(random_.Integer(1, 40)), first_position);
    const Units units(shape, random_);
    Units gathered(shape);
    std::vector<uint64_t> landed_checksums(shape.Units()), gathered_checksums(shape.Units());
    runner_.Run(LandArgs{.source = units.View(),
                         .target = pages.View(),
                         .first_position = first_position,
                         .unit_checksums = landed_checksums.data()});
    runner_.Run(GatherArgs{.source = pages.View(),
                           .first_position = first_position,
                           .units = gathered.pointers(),
                           .scales = gathered.scales(),
                           .unit_tokens = shape.unit_tokens,
                           .tokens = shape.tokens,
                           .heads = shape.heads,
                           .dim = shape.dim,
                           .unit_checksums = gathered_checksums.data()});
    EXPECT_TRUE(gathered.values() == units.values());
    EXPECT_EQ(gathered_checksums, landed_checksums);
  }
}

// Landings of several megabytes may be written differently from small ones.
TEST_P(RowsTest, LandsAndGathersAsLargeTransfersDo) {
  for (const RowFormat format : kRowFormats) {
    const bool misaligned = random_.Integer(0, 1) == 1;

    const RowsShape shape = {.tokens = 300, .unit_tokens = 128, .heads = 2, .dim = 256, .format = format};
    const Units units(shape, random_);
    Pages pages(random_, shape, PageOrder::kTokensFirst, 48, 5, misaligned);
    Pages::Memory expected = pages.memory();
    std::vector<uint64_t> checksums(shape.Units());
    LandArgs args = {.source = units.View(),
                     .rotation = MakeRotation(RopeStyle::kHalfSplit, 64),
                     .delta = 5,
                     .target = pages.ViewOf(expected),
                     .first_position = 5,
                     .batch_bytes = 1 << 30};
    reference_.Run(args);
    args.target = pages.View();
    args.unit_checksums = checksums.data();
    runner_.Run(args);
    EXPECT_LE(LargestDifference(pages.RowsOf(pages.memory()), pages.RowsOf(expected), kRotationTolerance), 1);
    EXPECT_TRUE(pages.SameElsewhere(pages.memory(), expected));
    EXPECT_EQ(checksums, units.Checksums());

    args.rotation = {};
    runner_.Run(args);
    Units gathered(shape);
    std::ranges::fill(checksums, 0);
    runner_.Run(GatherArgs{.source = pages.View(),
                           .first_position = 5,
                           .units = gathered.pointers(),
                           .scales = gathered.scales(),
                           .unit_tokens = shape.unit_tokens,
                           .tokens = shape.tokens,
                           .heads = shape.heads,
                           .dim = shape.dim,
                           .unit_checksums = checksums.data(),
                           .batch_bytes = 1 << 30});
    EXPECT_TRUE(gathered.values() == units.values());
    EXPECT_EQ(checksums, units.Checksums());
  }
}

// A layer of latent attention: the latents are copied bit by bit, and the rotary key parts are rotated.
TEST_P(RowsTest, LandsLatentsAndTheirRotaryParts) {
  for (const RowFormat format : kRowFormats) {
    const int64_t start = 1'000'003;
    const RowsShape latent = {.tokens = 70, .unit_tokens = 32, .heads = 1, .dim = 512, .format = format};
    RowsShape rotary = latent;
    rotary.dim = 64;
    const Units latents(latent, random_), parts(rotary, random_);
    Pages latent_pages(random_, latent, PageOrder::kTokensFirst, 16, start);
    Pages part_pages(random_, rotary, PageOrder::kTokensFirst, 16, start);
    Pages::Memory expected = part_pages.memory();
    LandArgs land = {.source = latents.View(), .delta = start, .target = latent_pages.View(), .first_position = start};
    runner_.Run(land);
    land.source = parts.View();
    land.rotation = MakeRotation(RopeStyle::kInterleaved, 64);
    land.target = part_pages.View();
    runner_.Run(land);
    land.target = part_pages.ViewOf(expected);
    reference_.Run(land);
    EXPECT_LE(
        LargestDifference(part_pages.RowsOf(part_pages.memory()), part_pages.RowsOf(expected), kRotationTolerance), 1);
    Units gathered(latent);
    runner_.Run(GatherArgs{.source = latent_pages.View(),
                           .first_position = start,
                           .units = gathered.pointers(),
                           .scales = gathered.scales(),
                           .unit_tokens = latent.unit_tokens,
                           .tokens = latent.tokens,
                           .heads = 1,
                           .dim = latent.dim});
    EXPECT_TRUE(gathered.values() == latents.values());
  }
}

TEST_P(RowsTest, NothingToLandTouchesNothing) {
  const RowsShape shape = {.tokens = 0, .unit_tokens = 2, .heads = 1, .dim = 4};
  Pages pages(random_, shape, PageOrder::kTokensFirst, 2, 0);
  runner_.Run(LandArgs{.source = {.unit_tokens = 2, .heads = 1, .dim = 4}, .target = pages.View()});
  EXPECT_TRUE(std::ranges::all_of(pages.memory().bytes, [](std::byte x) { return x == Pages::kUntouched; }));
}

// Wrong ways to rotate a key, each distinguished from the right one by the tests above.
TEST(RotationFaults, AreVisible) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const int32_t dim = 64;
  const int64_t start = 1'000'003;
  const Rows source({}, 4, dim, random);
  const std::vector<double> right = Frequencies(dim, 1e6), wrong = Frequencies(dim, 1e4);
  const auto turn = [&](RopeStyle style, int32_t rotary_dim, const std::vector<double>& frequencies, int64_t delta) {
    Rows target(source.format, source.rows, dim);
    Runner(Reference())
        .Run(RotateKeysArgs{.rotation = {style, rotary_dim, frequencies.data()},
                            .delta = delta,
                            .rows = source.rows,
                            .dim = dim,
                            .source = source.bytes.data(),
                            .target = target.bytes.data()});
    return target;
  };
  const Rows expected = turn(RopeStyle::kHalfSplit, dim, right, start);
  const auto error = [&](const Rows& rows) { return LargestDifference(rows, expected, kRotationTolerance); };
  constexpr double kVisible = 300;
  EXPECT_GT(error(turn(RopeStyle::kHalfSplit, dim, wrong, start)), kVisible) << "wrong base";
  EXPECT_GT(error(turn(RopeStyle::kInterleaved, dim, right, start)), kVisible) << "wrong pairs";
  EXPECT_GT(error(turn(RopeStyle::kHalfSplit, dim / 2, right, start)), kVisible) << "partly";
  EXPECT_GT(error(turn(RopeStyle::kHalfSplit, dim, right, -start)), kVisible) << "backwards";
  EXPECT_GT(error(turn(RopeStyle::kHalfSplit, dim, right, start - 1)), kVisible) << "one off";
  // Angles formed in fp32.
  std::vector<double> rounded(right.size());
  std::ranges::transform(right, rounded.begin(),
                         [&](double f) { return static_cast<float>(start) * static_cast<float>(f) / double{start}; });
  EXPECT_GT(error(turn(RopeStyle::kHalfSplit, dim, rounded, start)), kVisible) << "fp32 angles";
}

INSTANTIATE_TEST_SUITE_P(Backends, RowsTest, ::testing::ValuesIn(Backends()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::kernels::testing
