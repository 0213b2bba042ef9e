// SPDX-License-Identifier: Apache-2.0
// Planted faults of decoders: each gives an error far above the tolerance.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>

#include "kernels/testing/decoding_fixture.h"

namespace ashlar::kernels::testing {
namespace {

class DecodingFaultsTest : public DecodingFixture {
 protected:
  // A multiple of the tolerances of fp32, and of fp16 buffers: a fault must have a larger error.
  static constexpr double kFar = 3;
};

TEST_P(DecodingFaultsTest, ARejectedDraftLeftIn) {
  ForEachFamily(12, [&](const DecodeLayer& layer) {
    for (const DType buffer_type : {DType::kF32, DType::kF16}) {
      const TypedState initial(layer.shape, DType::kF32, random_);
      Session session(random_, layer.shape, buffer_type, 12, &initial);
      Verify(layer, session, 0, 4);
      session.filled = 3;  // two were accepted
      const RecurrentPass pass(layer, 0, 2, &initial);
      EXPECT_GT(Distance(Rebuilt(layer.shape, session, 3), pass.states.back()),
                kFar * DecodeTolerance(DType::kF32, buffer_type, 0));
    }
  });
}

TEST_P(DecodingFaultsTest, ASlotsOwnDecay) {
  ForEachFamily(8, [&](const DecodeLayer& layer) {
    if (layer.shape.family == Family::kDeltanet) return;  // deltanet has no decay
    const TypedState initial(layer.shape, DType::kF32, random_);
    Session session(random_, layer.shape, DType::kF32, 8, &initial);
    for (int64_t t = 0; t < 8; ++t) Step(layer, session, t);
    const RecurrentPass pass(layer, 0, 8, &initial);
    ASSERT_LE(Distance(Rebuilt(layer.shape, session, 8), pass.states.back()), 1e-5);
    Session twice = session, omitted = session;
    for (int32_t j = 0; j < 8; ++j) {
      for (int32_t h = 0; h < layer.shape.heads; ++h) {
        // A write that its own token's decay affects; a decay that does not affect the state before it.
        std::vector<float> write = twice.pages.Write(j, h);
        for (float& number : write) number *= std::exp(twice.pages.Gates(j, h)[0]);
        twice.pages.SetWrite(j, h, write.data());
        std::fill_n(omitted.pages.Gates(j, h), SlotGateWidth(layer.shape), 0.0f);
      }
    }
    EXPECT_GT(Distance(Rebuilt(layer.shape, twice, 8), pass.states.back()), kFar * 1e-5);
    EXPECT_GT(Distance(Rebuilt(layer.shape, omitted, 8), pass.states.back()), kFar * 1e-5);
  });
}

TEST_P(DecodingFaultsTest, TheValueInPlaceOfTheWrite) {
  ForEachFamily(8, [&](const DecodeLayer& layer) {
    if (BetaWidth(layer.shape) == 0) return;  // u is v
    for (const DType buffer_type : {DType::kF32, DType::kF16}) {
      const TypedState initial(layer.shape, DType::kF32, random_);
      Session session(random_, layer.shape, buffer_type, 8, &initial);
      for (int64_t t = 0; t < 8; ++t) Step(layer, session, t);
      for (int32_t j = 0; j < 8; ++j) {
        for (int32_t h = 0; h < layer.shape.heads; ++h) {
          session.pages.SetWrite(j, h, layer.v.data() + j * layer.v_stride + h * layer.shape.d_v);
        }
      }
      EXPECT_GT(Distance(Rebuilt(layer.shape, session, 8), RecurrentPass(layer, 0, 8, &initial).states.back()),
                kFar * DecodeTolerance(DType::kF32, buffer_type, 0));
    }
  });
}

TEST_P(DecodingFaultsTest, AFlushCountedTwice) {
  ForEachFamily(8, [&](const DecodeLayer& layer) {
    const TypedState initial(layer.shape, DType::kF32, random_);
    Session session(random_, layer.shape, DType::kF32, 8, &initial);
    for (int64_t t = 0; t < 7; ++t) Step(layer, session, t);
    BufferedRequest request = session.View();
    runner_.Run(RebuildStateArgs{.shape = layer.shape, .request = request, .tokens = 7, .target = request.state});
    const std::vector<float> out = Step(layer, session, 7);  // `filled` was not lowered
    const RecurrentPass pass(layer, 0, 8, &initial);
    const auto last = pass.out.end() - layer.shape.heads * layer.shape.d_v;
    EXPECT_GT(Distance(out, {last, pass.out.end()}), kFar * 1e-5);
  });
}
INSTANTIATE_TEST_SUITE_P(Every, DecodingFaultsTest, EveryDecoding(), kDecodingName);

}  // namespace
}  // namespace ashlar::kernels::testing
