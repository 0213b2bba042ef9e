// SPDX-License-Identifier: Apache-2.0
// Decoding from buffers on the host back end at each compiled vector width that this machine supports, as on other
// CPUs.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "kernels/testing/backends.h"
#include "kernels/testing/decoding_inputs.h"
#include "kernels/testing/print.h"

namespace ashlar::kernels::testing {
namespace {

class DecodingTargetsTest : public ::testing::TestWithParam<std::tuple<int64_t, StateOrder>> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(std::get<0>(GetParam())); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner host_{Host()};
};

// Two tokens, then five drafts of which two are accepted, and a third token that flushes.
TEST_P(DecodingTargetsTest, DecodesVerifiesAndFlushes) {
  for (const Family family : kBufferedFamilies) {
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(Name(family) + ", state and buffer " + Name(type));
      const DecodeLayer layer(random_, family, std::get<1>(GetParam()), 7);
      const TypedState initial(layer.shape, type, random_);
      TypedState state = initial;
      SlotPages pages(random_, layer.shape, type, 7, 3);
      const int64_t token_floats = int64_t{layer.shape.heads} * layer.shape.d_v;
      std::vector<float> out(static_cast<size_t>(7 * token_floats));
      const auto decode = [&](int64_t t, int32_t filled, bool flush) {
        const BufferedRequest request{.state = state.View(), .buffer = pages.View(filled), .flush = flush};
        host_.Run(DecodeBufferedArgs{.shape = layer.shape,
                                     .requests = {&request, 1},
                                     .inputs = layer.View(t, t + 1),
                                     .out = out.data() + t * token_floats,
                                     .out_stride = token_floats});
      };
      decode(0, 0, false);
      decode(1, 1, false);
      const BufferedRequest request{.state = state.View(), .buffer = pages.View(2)};
      host_.Run(VerifyDraftsArgs{.shape = layer.shape,
                                 .requests = {&request, 1},
                                 .drafts = 5,
                                 .inputs = layer.View(2, 7),
                                 .out = out.data() + 2 * token_floats,
                                 .out_stride = token_floats});
      const double tolerance = DecodeTolerance(type, type, 1);
      EXPECT_LE(Distance(out, RecurrentPass(layer, 0, 7, &initial).out), tolerance);
      EXPECT_EQ(state.bytes(), initial.bytes());
      decode(4, 4, true);
      EXPECT_LE(Distance(state.Floats(), RecurrentPass(layer, 0, 5, &initial).states.back()), tolerance);
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

INSTANTIATE_TEST_SUITE_P(Every, DecodingTargetsTest,
                         ::testing::Combine(::testing::ValuesIn(Targets()),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& instance) {
                           return std::string(hwy::TargetName(std::get<0>(instance.param))) + "_" +
                                  Name(std::get<1>(instance.param));
                         });

}  // namespace
}  // namespace ashlar::kernels::testing
