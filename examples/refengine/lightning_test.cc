// SPDX-License-Identifier: Apache-2.0
// The model with lightning's recurrence, whose linear layers rotate their keys: it agrees with the plain model, and is
// assembled from cached segments as exactly.
#include "examples/refengine/composition_fixture.h"

namespace ashlar::refengine {
namespace {

class LightningTest : public CompositionFixture {
 protected:
  LightningTest() : CompositionFixture(TinyLightningConfig) {}

  static constexpr SeamWidths kSeams = {8, 8};
};

TEST_F(LightningTest, AgreesWithThePlainModel) {
  ExpectAgreesWithThePlainModel();
}

TEST_F(LightningTest, IsolatedSegmentsComposeExactlyInLayer0) {
  MakePrompt(5, 80, 140);
  const std::vector<StoredSegment> stored = CaptureIsolated(kSeams);
  const Composed composed = RunChain(stored, kSeams);
  const Composed recomputed = Recompute(composed.positions);
  EXPECT_LE(Layer0Error(composed, recomputed), 1e-5);
}

TEST_F(LightningTest, PassBoundariesMaySplitIsolatedCaptures) {
  MakePrompt(4, 60, 90);
  engine_ = std::make_unique<Engine>(model_, kernels_, threads_, EngineOptions{.pass_tokens = 13});
  const Composed composed = RunChain(CaptureIsolated(kSeams), kSeams);
  const Composed recomputed = Recompute(composed.positions);
  EXPECT_LE(Layer0Error(composed, recomputed), 1e-5);
}

// Mistakes in layer 0, where the right way is exact: states left at position 0, or rotated by their interior's start
// instead of their segment's; transitions omitted or taken as zero.
TEST_F(LightningTest, KnownMistakesAreDetectedInLayer0) {
  MakePrompt(5, 80, 140);
  const std::vector<StoredSegment> stored = CaptureIsolated(kSeams);
  const Composed recomputed = Recompute(RunChain(stored, kSeams).positions);
  const auto error = [&](auto&& change) { return Layer0Error(RunChain(stored, kSeams, change), recomputed); };
  EXPECT_PRED2(IsVisible, error([](size_t, LayerTables layers) {
                 layers.StandAt(0);
                 return layers;
               }),
               1e-2);
  EXPECT_PRED2(IsVisible, error([&](size_t i, LayerTables layers) {
                 layers.StandAt(Start(i) + (i == 0 ? 0 : kSeams.head));
                 return layers;
               }),
               1e-2);
  for (const auto with : {ReplacedTransitions::With::kIdentity, ReplacedTransitions::With::kZero}) {
    const ReplacedTransitions replaced(config(), with);
    EXPECT_PRED2(IsVisible, error([&](size_t i, const LayerTables& layers) {
                   LayerTables changed = replaced(layers.layers());
                   changed.StandAt(Start(i));
                   return changed;
                 }),
                 1e-2);
  }
}

TEST(LightningModelTest, DeclaresWhatTheCacheNeeds) {
  const Model model(TinyLightningConfig(1));
  const Layout layout = model.layout(8, 8, 16);
  EXPECT_TRUE(Validate(layout).ok()) << Validate(layout);
  const auto& linear = std::get<LinearLayer>(layout.layers[0]);
  EXPECT_EQ(linear.family, Family::kLightning);
  EXPECT_EQ(linear.transition, TransitionForm::kScalar);
  EXPECT_EQ(linear.decay_table, model.weights().layers[0].linear.log_decay);
  EXPECT_NE(linear.decay_table, std::get<LinearLayer>(layout.layers[1]).decay_table);
  EXPECT_EQ(linear.rope.rotary_dim, 10u);
}

}  // namespace
}  // namespace ashlar::refengine
