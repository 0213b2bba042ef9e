// SPDX-License-Identifier: Apache-2.0
// Objects of every linear family, state type and form of transition: published, verified, composed in place, and no
// larger than their forms require.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"
#include "proto/testing/sample_layouts.h"
#include "proto/tuple_parts.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/layer_of.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using kernels::testing::Dtypes;
using kernels::testing::Random;
using kernels::testing::Tuple;

constexpr SessionId kSession = 1;

// Stores some heads as zero, and some heads of dense families as low rank. Returns the forms.
std::vector<TransitionRun> MixForms(Random& random, const LinearLayer& layer, Tuple& tuple) {
  const TupleShape shape = TupleShapeOf(layer);
  std::vector<TransitionRun> runs;
  for (uint32_t head = 0; head < layer.value_heads; ++head) {
    TransitionRun run{.first_head = head, .heads = 1, .form = layer.transition};
    const int64_t choice = random.Integer(0, 2);
    const bool low_rank = layer.transition == TransitionForm::kDense &&
                          TransitionBytes(shape, layer.state_dtype, TransitionForm::kLowRank, 1) <
                              TransitionBytes(shape, layer.state_dtype, TransitionForm::kDense);
    if (choice == 0) {
      run.form = TransitionForm::kZero;
      tuple.MakeZero(static_cast<int32_t>(head));
    } else if (choice == 1 && low_rank) {
      run.form = TransitionForm::kLowRank;
      run.rank = 1;
      kernels::testing::Factors factors;
      for (auto* numbers : {&factors.d, &factors.a, &factors.b}) {
        for (uint32_t i = 0; i < layer.d_k; ++i) numbers->push_back(random.Uniform(-0.3, 0.3));
      }
      tuple.MakeLowRank(static_cast<int32_t>(head), factors);
    }
    runs.push_back(run);
  }
  return runs;
}

// A part's units as an engine holds them, densely.
std::vector<std::byte> BytesOf(const Part& part, const kernels::TupleView& tuple) {
  std::vector<std::byte> bytes(part.Bytes());
  for (uint32_t unit = 0; unit < part.units; ++unit) {
    const kernels::HeadTuple& head = tuple.heads[part.head_group + unit];
    const void* from = IsTransition(part.form) ? head.transition : head.state;
    if (part.form != PartForm::kStateExponents) {
      std::memcpy(bytes.data() + uint64_t{unit} * part.unit_bytes, from, part.unit_bytes);
      continue;
    }
    for (size_t h = 0; h < bytes.size() / sizeof(int32_t); ++h) {
      std::memcpy(bytes.data() + h * sizeof(int32_t), &tuple.heads[h].state_exponent, sizeof(int32_t));
    }
  }
  return bytes;
}

// Makes a source that publishes an object of tensors only; `fill(part)` returns each part's bytes.
template <typename Fill>
PublishSource SourceOf(ObjectHeader plan, Fill fill) {
  auto memory = std::make_shared<std::vector<std::vector<std::byte>>>();
  PublishSource source;
  for (const Part& part : plan.parts) {
    if (part.Empty()) continue;
    memory->push_back(fill(part));
    source.tensors.push_back({part.layer, part.form, memory->back().data(), part.head_group});
  }
  source.keep = memory;
  source.plan = std::move(plan);
  return source;
}

ObjectHeader Plan(const Layout& layout, uint8_t key, uint64_t tokens = 1) {
  Key name;
  name.bytes.fill(key);
  return *PlanObject(layout, {}, name, ObjectKind::kSegment, layout.head + layout.tail + tokens);
}

class FormsTest : public ::testing::Test {
 protected:
  FormsTest() { rig_.cache.OpenSession(kSession, kTenant); }

  PublishOutcome Publish(const ObjectHeader& natural, PublishSource source) {
    const Cache::Reservation reservation = rig_.cache.Reserve(kSession, natural);
    EXPECT_EQ(reservation.outcome, ReserveOutcome::kGranted);
    const auto outcome = rig_.StartPublish(kSession, reservation.id, std::move(source));
    rig_.executor.CompleteAll();
    return outcome->value();
  }
  uint64_t UsedExtents() const { return rig_.tier->Usage(kTenant).used_bytes / limits::kExtentBytes; }

  Rig rig_{256};
};

// Compares one prompt's interiors, published with forms of all kinds and composed by the cache, with kernels on the
// original tuples: the bits must be equal.
void ComposeStored(Rig& rig, Random& random, Family family, StateOrder order, Dtypes dtypes, uint8_t& next_key) {
  const kernels::testing::Character character{.magnitude = dtypes.state == DType::kF16 ? 1e6 : 1};
  const kernels::testing::Prompt prompt(random, kernels::testing::RandomLayer(random, family, order, 24, character),
                                        {.interiors = 3});
  const Layout layout{.page_tokens = 1, .layers = {LayerOf(prompt.shape, dtypes.state)}};
  std::vector<Tuple> tuples = kernels::testing::Rounded(prompt.tuples, dtypes);
  std::vector<Query> queries;
  Composition work;
  for (Tuple& tuple : tuples) {
    const ObjectHeader natural = Plan(layout, next_key++);
    const ObjectHeader plan = *PlanForms(natural, MixForms(random, std::get<LinearLayer>(layout.layers[0]), tuple));
    const kernels::TupleView view = tuple.View();
    const Cache::Reservation reservation = rig.cache.Reserve(kSession, natural);
    const auto outcome = rig.StartPublish(kSession, reservation.id,
                                          SourceOf(plan, [&](const Part& part) { return BytesOf(part, view); }));
    rig.executor.CompleteAll();
    ASSERT_EQ(outcome->value(), PublishOutcome::kPublished);
    work.interiors.push_back(
        {.segment = static_cast<uint32_t>(queries.size()), .first_position = static_cast<uint64_t>(tuple.position)});
    queries.push_back(rig.Ask(natural));
  }
  const Match match = rig.cache.Lookup(kSession, queries);

  kernels::testing::Runner runner(kernels::Reference());
  kernels::testing::States expected =
      kernels::testing::Compose(runner, prompt.shape, kernels::testing::Views(tuples), prompt.initial);
  const size_t head_bytes = static_cast<size_t>(prompt.initial.count()) * sizeof(float);
  auto state = std::make_shared<std::vector<std::byte>>(head_bytes * prompt.shape.heads);
  for (int32_t h = 0; h < prompt.shape.heads; ++h) {
    std::memcpy(state->data() + h * head_bytes, prompt.initial.data(h), head_bytes);
  }
  work.layers.push_back({.layer = 0, .shape = prompt.shape, .state = {.data = state->data()}});
  work.keep = state;
  std::optional<CompositionVerdict> verdict;
  rig.cache.Compose(kSession, next_key, match.lease, std::move(work), [&](CompositionVerdict v) { verdict = v; });
  rig.executor.CompleteAll();
  ASSERT_TRUE(verdict.has_value());
  ASSERT_EQ(verdict->outcome, MissReason::kNone);
  for (int32_t h = 0; h < prompt.shape.heads; ++h) {
    EXPECT_EQ(std::memcmp(state->data() + h * head_bytes, expected.data(h), head_bytes), 0) << "head " << h;
  }
}

TEST_F(FormsTest, ComposesWhatWasPublishedBitForBit) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  using enum DType;
  uint8_t next_key = 1;
  for (const Family family : kernels::testing::kFamilies) {
    for (const StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
      for (const Dtypes dtypes : {Dtypes{}, Dtypes{kF16, kF16}, Dtypes{kF16, kBF16}}) {
        SCOPED_TRACE(testing::Message() << kernels::testing::Name(family) << " " << dtypes);
        ASSERT_NO_FATAL_FAILURE(ComposeStored(rig_, random, family, order, dtypes, next_key));
      }
    }
  }
}

// Every part of an object of any layout and form holds the published bytes, and a flipped bit in any part is detected.
TEST_F(FormsTest, VerifiesEveryPart) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (uint8_t key = 1; key <= 30; ++key) {
    Layout layout = RandomLayout(random);
    std::erase_if(layout.layers, [](const Layer& layer) { return std::holds_alternative<AttentionLayer>(layer); });
    if (layout.layers.empty()) continue;
    const ObjectHeader natural = Plan(layout, key);
    const auto plan = PlanForms(natural, RandomRuns(random, layout));
    if (!plan.ok()) continue;  // more extents than in its layers' own forms
    std::vector<std::vector<std::byte>> published;
    ASSERT_EQ(Publish(natural, SourceOf(*plan,
                                        [&](const Part& part) {
                                          std::vector<std::byte>& bytes = published.emplace_back(part.Bytes());
                                          for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
                                          return bytes;
                                        })),
              PublishOutcome::kPublished);
    const Match match = rig_.Lookup(kSession, natural);
    const Found& found = match.found[0];
    ASSERT_NE(found.header, nullptr);
    ASSERT_EQ(found.slot->Extents(), found.header->Extents());
    const ObjectBytes bytes(*rig_.tier, *found.slot);
    std::vector<std::byte*> units;  // one unit of every part
    for (const Part& part : found.header->parts) {
      if (part.Empty()) continue;
      const std::vector<std::byte>& from = published.at(units.size());
      for (uint32_t unit = 0; unit < part.units; ++unit) {
        ASSERT_EQ(std::memcmp(bytes.Unit(part, unit), from.data() + uint64_t{unit} * part.unit_bytes, part.unit_bytes),
                  0)
            << Name(part.form);
      }
      units.push_back(bytes.Unit(part, random() % part.units));
    }
    const auto land = [&](LandingId id) {
      const auto landing = rig_.StartLanding(kSession, id, match.lease, {.segments = {{.index = 0}}});
      rig_.executor.CompleteAll();
      return landing->verdict.value().front();
    };
    ASSERT_EQ(land(1), MissReason::kNone);
    *units[random() % units.size()] ^= std::byte{1};
    EXPECT_EQ(land(2), MissReason::kChecksumFailed);
    rig_.cache.Release(kSession, match.lease);
  }
}

// Dense, an object of this layout takes 3 extents; without transitions it takes one.
Layout WideLayout() {
  return {.page_tokens = 1, .layers = {LinearLayer{.key_heads = 1, .value_heads = 8, .d_k = 128, .d_v = 8}}};
}

PublishSource ZeroSource(const ObjectHeader& natural) {
  const TransitionRun zero{.heads = 8, .form = TransitionForm::kZero};
  return SourceOf(*PlanForms(natural, {&zero, 1}),
                  [](const Part& part) { return std::vector<std::byte>(part.Bytes()); });
}

TEST_F(FormsTest, FreesUnusedExtentsOfForms) {
  const ObjectHeader natural = Plan(WideLayout(), 1);
  ASSERT_EQ(natural.Extents(), 3u);
  const Cache::Reservation reservation = rig_.cache.Reserve(kSession, natural);
  EXPECT_EQ(UsedExtents(), 3u);
  const auto outcome = rig_.StartPublish(kSession, reservation.id, ZeroSource(natural));
  rig_.executor.CompleteAll();
  ASSERT_EQ(outcome->value(), PublishOutcome::kPublished);
  EXPECT_EQ(UsedExtents(), 1u);
  EXPECT_EQ(rig_.cache.stats().object_bytes, rig_.observer.published_bytes);
  EXPECT_LT(rig_.observer.published_bytes, limits::kExtentBytes);
}

TEST_F(FormsTest, FreedExtentsAreReused) {
  Rig rig(4);
  rig.cache.OpenSession(kSession, kTenant);
  for (const uint8_t key : {1, 2}) {
    const ObjectHeader natural = Plan(WideLayout(), key);
    const Cache::Reservation reservation = rig.cache.Reserve(kSession, natural);
    ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted) << int{key};
    rig.StartPublish(kSession, reservation.id, ZeroSource(natural));
    rig.executor.CompleteAll();
  }
  EXPECT_TRUE(rig.observer.evicted.empty());
  EXPECT_EQ(rig.Reason(kSession, Plan(WideLayout(), 1)), MissReason::kNone);
  EXPECT_EQ(rig.Reason(kSession, Plan(WideLayout(), 2)), MissReason::kNone);
  // A third object, dense: the two objects of one extent each must leave for it, which counts as one eviction.
  const ObjectHeader dense = Plan(WideLayout(), 3);
  EXPECT_EQ(rig.cache.Reserve(kSession, dense).outcome, ReserveOutcome::kGranted);
  EXPECT_EQ(rig.observer.evicted.size(), 1u);
  EXPECT_EQ(rig.tier->Usage(kTenant).used_bytes, 4 * limits::kExtentBytes);
}

TEST_F(FormsTest, ABusyMoverKeepsTheReservation) {
  const ObjectHeader natural = Plan(WideLayout(), 1);
  const Cache::Reservation reservation = rig_.cache.Reserve(kSession, natural);
  rig_.executor.set_capacity(0);
  EXPECT_EQ(rig_.StartPublish(kSession, reservation.id, ZeroSource(natural))->value(), PublishOutcome::kBusy);
  EXPECT_EQ(*rig_.cache.Planned(kSession, reservation.id), natural);
  EXPECT_EQ(UsedExtents(), 3u);
}

TEST_F(FormsTest, RefusesAPlanThatIsNotTheReservations) {
  const ObjectHeader natural = Plan(WideLayout(), 1);
  EXPECT_EQ(Publish(natural, ZeroSource(Plan(WideLayout(), 2))), PublishOutcome::kBadSource);
  Layout larger = WideLayout();
  for (int i = 0; i < 2; ++i) larger.layers.push_back(larger.layers[0]);
  EXPECT_EQ(Publish(natural, ZeroSource(Plan(larger, 1))), PublishOutcome::kBadSource);
  PublishSource missing = ZeroSource(natural);
  missing.tensors.clear();
  EXPECT_EQ(Publish(natural, std::move(missing)), PublishOutcome::kBadSource);
  EXPECT_EQ(UsedExtents(), 0u);
}

}  // namespace
}  // namespace ashlar::storage
