// SPDX-License-Identifier: Apache-2.0
// Attention on the host back end at each compiled vector width that this machine supports, without a matrix unit, as on
// other CPUs.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "kernels/host/simd/tiles.h"
#include "kernels/testing/attention_inputs.h"

namespace ashlar::kernels::testing {
namespace {

class AttentionTargetsTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    host::AllowTiles(false);
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    host::AllowTiles(true);
  }
};

TEST_P(AttentionTargetsTest, AgreesWithTheReference) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  Runner host(Host()), reference(Reference());
  for (const RowFormat format : kRowFormats) {
    for (const AttentionKind kind : {AttentionKind::kGqa, AttentionKind::kMla}) {
      for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
        AttentionCase what = RandomCase(random, kind, format, 1'000'003);
        what.style = style;
        const AttentionContext context(random, what);
        for (const Stand stand : kStands) {
          SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
          EXPECT_LE(LargestError(what.shape, context.Run(host, stand), context.Run(reference, stand)), 1e-5);
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

INSTANTIATE_TEST_SUITE_P(Every, AttentionTargetsTest, ::testing::ValuesIn(Targets()),
                         [](const auto& instance) { return std::string(hwy::TargetName(instance.param)); });

}  // namespace
}  // namespace ashlar::kernels::testing
