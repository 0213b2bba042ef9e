// SPDX-License-Identifier: Apache-2.0
// Rows on the host back end at each compiled vector width that this machine supports, as on other CPUs.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"

namespace ashlar::kernels::testing {
namespace {

constexpr double kRotationTolerance = 1e-6;

class RowsTargetsTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner host_{Host()}, reference_{Reference()};
};

TEST_P(RowsTargetsTest, TurnsKeys) {
  for (const RowFormat format : kRowFormats) {
    for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      for (const int32_t rotary_dim : {2, 16, 30, 64}) {
        SCOPED_TRACE(format.Name() + ", style " + std::to_string(static_cast<int>(style)) + ", rotary " +
                     std::to_string(rotary_dim));
        const std::vector<double> frequencies = Frequencies(rotary_dim, 1e6);
        const Rows source(format, 21, 67, random_);
        Rows target(format, 21, 67), expected(format, 21, 67);
        RotateKeysArgs args = {.rotation = {style, rotary_dim, frequencies.data()},
                               .delta = random_.Integer(1, 1'000'000),
                               .rows = source.rows,
                               .dim = source.dim,
                               .dtype = format.dtype,
                               .source = source.bytes.data(),
                               .target = target.bytes.data(),
                               .source_scales = format.scaled ? source.scales.data() : nullptr,
                               .target_scales = format.scaled ? target.scales.data() : nullptr};
        host_.Run(args);
        args.target = expected.bytes.data();
        args.target_scales = format.scaled ? expected.scales.data() : nullptr;
        reference_.Run(args);
        EXPECT_LE(LargestDifference(target, expected, kRotationTolerance), 1);
      }
    }
  }
}

// Through the cache, and past it as for transfers of many megabytes.
TEST_P(RowsTargetsTest, LandsAndGathers) {
  const std::vector<double> frequencies = Frequencies(32, 1e6);
  for (const RowFormat format : kRowFormats) {
    for (const int32_t dim : {37, 64}) {
      for (const RopeStyle style : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
        for (const int64_t batch_bytes : {int64_t{0}, int64_t{1} << 30}) {
          SCOPED_TRACE(format.Name() + ", dim " + std::to_string(dim) + ", style " +
                       std::to_string(static_cast<int>(style)) + ", batch " + std::to_string(batch_bytes));
          const RowsShape shape = {.tokens = 53, .unit_tokens = 8, .heads = 3, .dim = dim, .format = format};
          const Units units(shape, random_);
          Pages pages(random_, shape, PageOrder::kTokensFirst, 16, 5);
          Pages::Memory expected = pages.memory();
          LandArgs land = {.source = units.View(),
                           .rotation = {style, 32, frequencies.data()},
                           .delta = 5,
                           .target = pages.ViewOf(expected),
                           .first_position = 5,
                           .batch_bytes = batch_bytes};
          reference_.Run(land);
          land.target = pages.View();
          host_.Run(land);
          EXPECT_LE(LargestDifference(pages.RowsOf(pages.memory()), pages.RowsOf(expected), kRotationTolerance), 1);
          if (style == RopeStyle::kNone) {
            EXPECT_TRUE(pages.memory() == expected);
          }
          EXPECT_TRUE(pages.SameElsewhere(pages.memory(), expected));

          Units gathered(shape), expected_units(shape);
          const auto gather = [&](Units& to) {
            return GatherArgs{.source = pages.View(),
                              .first_position = 5,
                              .units = to.pointers(),
                              .scales = to.scales(),
                              .unit_tokens = shape.unit_tokens,
                              .tokens = shape.tokens,
                              .heads = shape.heads,
                              .dim = shape.dim,
                              .batch_bytes = batch_bytes};
          };
          host_.Run(gather(gathered));
          reference_.Run(gather(expected_units));
          EXPECT_TRUE(gathered.values() == expected_units.values());
        }
      }
    }
  }
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON, HWY_SCALAR, HWY_EMU128}) {
    if ((hwy::SupportedTargets() & target & HWY_TARGETS) != 0) targets.push_back(target);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(Every, RowsTargetsTest, ::testing::ValuesIn(Targets()),
                         [](const auto& instance) { return std::string(hwy::TargetName(instance.param)); });

}  // namespace
}  // namespace ashlar::kernels::testing
