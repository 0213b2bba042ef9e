// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/mover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/testing/print.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/recorded_landing.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class MoverTest : public ::testing::TestWithParam<const kernels::Kernels*> {
 protected:
  struct Object {
    ObjectHeader header;
    Slot slot;
    uint64_t text;
  };

  Object Publish(uint64_t text, uint64_t tokens, ObjectKind kind = ObjectKind::kSegment) {
    Object object{TestPlan(text, tokens, kind), {}, text};
    object.slot = *tier_->Allocate(1, object.header.Extents());
    EXPECT_TRUE(mover_.Publish(object.header, object.slot, TestSource(object.header, text), CancelFlag(),
                               [&](std::optional<ObjectHeader> header) { object.header = header.value(); }));
    executor_.CompleteAll();
    return object;
  }

  // fn(part, object): an object of 120 tokens, of which that part is corrupt. The pages are empty.
  template <typename Fn>
  void ForEveryCorruptPart(const TestPages& pages, const Fn& fn) {
    for (const Part& part : TestPlan(2, 120).parts) {
      SCOPED_TRACE(std::string(Name(part.form)) + " of layer " + std::to_string(part.layer));
      Object bad = Publish(2, 120);
      Corrupt(*tier_, bad.slot, bad.header, part.layer, part.form);
      std::ranges::fill(TestPages(pages).memory(), 0.0f);
      fn(part, bad);
      tier_->Free(bad.slot);
    }
  }

  std::unique_ptr<RecordedLanding> Land(const std::vector<std::pair<const Object*, uint64_t>>& objects,
                                        const TestPages& pages, CancelFlag cancel = {},
                                        const std::vector<const Object*>& tuples_only = {}) {
    auto landing = std::make_unique<RecordedLanding>();
    std::vector<LandSource> sources;
    for (const auto& [object, position] : objects) sources.push_back({&object->header, &object->slot, position});
    for (const Object* object : tuples_only) sources.push_back({&object->header, &object->slot, 0, /*tokens=*/0});
    mover_.Land(kTenant, std::move(sources), TestTarget(pages, {}), std::move(cancel), *landing);
    return landing;
  }

  std::unique_ptr<MemoryTier> tier_ = TestTier({{1, 64}});
  ManualExecutor executor_;
  InlineWorkers workers_;
  Mover mover_{*GetParam(), workers_, executor_, *tier_, /*turn_bytes=*/1};  // each layer takes a turn
};

TEST_P(MoverTest, LandsTheBytesThatWerePublished) {
  // One token more than the seams; a partly filled page and unit; several units.
  for (const uint64_t tokens : {9u, 64u, 77u, 500u}) {
    SCOPED_TRACE(tokens);
    const Object object = Publish(tokens, tokens);
    EXPECT_EQ(TupleError(*tier_, object.slot, object.header, object.text), 0.0);
    const TestPages pages(70);
    const auto events = Land({{&object, 333}}, pages);
    executor_.CompleteAll();
    EXPECT_EQ(events->done, MissReason::kNone);
    EXPECT_THAT(events->progress, ElementsAre(1, 2));
    EXPECT_LT(LandingError(pages, object.header, object.text, 333), 1e-5);
    tier_->Free(object.slot);
  }
}

TEST_P(MoverTest, LandsACheckpointWhole) {
  const Object object = Publish(3, 40, ObjectKind::kCheckpoint);
  ASSERT_EQ(object.header.first_token, 0u);
  const TestPages pages(4);
  const auto events = Land({{&object, 0}}, pages);
  executor_.CompleteAll();
  EXPECT_EQ(events->done, MissReason::kNone);
  EXPECT_EQ(LandingError(pages, object.header, object.text, 0), 0.0) << "position 0 turns nothing";
}

TEST_P(MoverTest, WritesTheHeaderAtTheObjectsStart) {
  const Object object = Publish(4, 64);
  const ObjectBytes bytes(*tier_, object.slot);
  const absl::StatusOr<ObjectHeader> read =
      DecodeHeader(absl::string_view(reinterpret_cast<const char*>(bytes.start()), limits::kExtentBytes));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, object.header);
  EXPECT_TRUE(std::all_of(read->parts.begin(), read->parts.end(), [](const Part& p) { return p.checksum != 0; }));
}

TEST_P(MoverTest, ChecksumsDoNotDependOnTheBackEnd) {
  const Object object = Publish(5, 100);
  Mover reference(kernels::Reference(), workers_, executor_, *tier_);
  std::optional<ObjectHeader> expected;
  const Slot slot = *tier_->Allocate(1, object.header.Extents());
  ASSERT_TRUE(reference.Publish(TestPlan(5, 100), slot, TestSource(object.header, 5), CancelFlag(),
                                [&](std::optional<ObjectHeader> header) { expected = std::move(header); }));
  executor_.CompleteAll();
  EXPECT_EQ(expected, object.header);
}

TEST_P(MoverTest, FindsEveryCorruptPartAndLandsTheOthers) {
  const TestPages pages(40);
  const Object good = Publish(1, 80);
  ForEveryCorruptPart(pages, [&](const Part&, const Object& bad) {
    const auto events = Land({{&bad, 0}, {&good, 200}}, pages);
    executor_.CompleteAll();
    EXPECT_EQ(events->done, MissReason::kNone);
    EXPECT_THAT(events->corrupt, ElementsAre(0));
    EXPECT_LT(LandingError(pages, good.header, good.text, 200), 1e-5);
  });
}

// For no token: rows are neither landed nor verified, but tuples are verified.
TEST_P(MoverTest, VerifiesTuplesOfSegmentsThatDoNotLand) {
  const TestPages pages(40);
  const Object good = Publish(1, 80);
  ForEveryCorruptPart(pages, [&](const Part& part, const Object& bad) {
    const auto events = Land({{&good, 200}}, pages, {}, /*tuples_only=*/{&bad});
    executor_.CompleteAll();
    EXPECT_EQ(events->done, MissReason::kNone);
    EXPECT_THAT(events->corrupt, ElementsAreArray(std::vector<size_t>(IsPaged(part.form) ? 0 : 1, 1)));
    EXPECT_LT(LandingError(pages, good.header, good.text, 200), 1e-5);
    for (uint64_t position = 0; position < 120; ++position) EXPECT_EQ(*pages.Value(0, position, 0), 0) << position;
  });
}

// The same object twice: one lands its rows, the other wants none, in either order.
TEST_P(MoverTest, LandsASegmentWhoseTuplesAnotherRequestReads) {
  const TestPages pages(40);
  const Object object = Publish(1, 120);
  for (const bool rows_first : {false, true}) {
    SCOPED_TRACE(rows_first);
    std::ranges::fill(TestPages(pages).memory(), 0.0f);
    std::vector<LandSource> sources = {{&object.header, &object.slot, 200},
                                       {&object.header, &object.slot, 0, /*tokens=*/0}};
    if (!rows_first) std::swap(sources[0], sources[1]);
    RecordedLanding landing;
    mover_.Land(kTenant, std::move(sources), TestTarget(pages, {}), {}, landing);
    executor_.CompleteAll();
    EXPECT_EQ(landing.done, MissReason::kNone);
    EXPECT_THAT(landing.corrupt, IsEmpty());
    EXPECT_LT(LandingError(pages, object.header, object.text, 200), 1e-5);
    EXPECT_EQ(*pages.Value(0, 0, 0), 0);
  }
}

TEST_P(MoverTest, ReadsARepeatedTextsTuplesOnce) {
  const Object object = Publish(1, 64), large = Publish(2, 400);  // a single thread reads a small object
  const TestPages pages(TestPages::Holding(528));
  const auto tasks = [&](std::vector<std::pair<const Object*, uint64_t>> objects) {
    objects.emplace_back(&large, 128);
    int64_t count = 0;
    workers_.before_task = [&](int64_t) { ++count; };
    const auto events = Land(objects, pages);
    executor_.CompleteAll();
    workers_.before_task = nullptr;
    EXPECT_EQ(events->done, MissReason::kNone);
    EXPECT_THAT(events->corrupt, IsEmpty());
    return count;
  };
  const int64_t once = tasks({{&object, 0}});
  const auto paged = std::ranges::count_if(object.header.parts, [](const Part& part) { return IsPaged(part.form); });
  EXPECT_EQ(tasks({{&object, 0}, {&object, 64}}), once + paged);
  EXPECT_LT(LandingError(pages, object.header, object.text, 0), 1e-5);
  EXPECT_LT(LandingError(pages, object.header, object.text, 64), 1e-5);

  Corrupt(*tier_, object.slot, object.header, 0, PartForm::kState);
  const auto events = Land({{&object, 0}, {&object, 64}}, pages);
  executor_.CompleteAll();
  EXPECT_THAT(events->corrupt, ElementsAre(0, 1));
}

TEST_P(MoverTest, OneItemCoversAllLayersOfATurn) {
  const Object good = Publish(1, 64), bad = Publish(2, 64);
  Corrupt(*tier_, bad.slot, bad.header, bad.header.parts.back().layer, bad.header.parts.back().form);
  const TestPages pages(16);
  Mover mover(*GetParam(), workers_, executor_, *tier_);
  RecordedLanding landing;
  const std::vector<std::string>& events = landing.events;
  mover.Land(kTenant, {{&good.header, &good.slot, 0}, {&bad.header, &bad.slot, 64}}, TestTarget(pages, {}),
             CancelFlag(), landing);
  ASSERT_EQ(executor_.pending(), 1u);
  executor_.Work(0);
  EXPECT_THAT(events, IsEmpty()) << "reports come on the metadata thread";
  executor_.Complete(0);
  EXPECT_EQ(executor_.pending(), 0u);
  // The metadata thread was busy while both layers landed: one report covers both.
  EXPECT_THAT(events, ElementsAre("corrupt 1", "landed 2", std::string(Name(MissReason::kNone))));
  EXPECT_LT(LandingError(pages, good.header, good.text, 0), 1e-5);
}

TEST_P(MoverTest, YieldsAfterEachLayerWhileOthersWait) {
  const Object good = Publish(1, 64), bad = Publish(2, 64);
  Corrupt(*tier_, bad.slot, bad.header, bad.header.parts.back().layer, bad.header.parts.back().form);
  const TestPages pages(16);
  Mover mover(*GetParam(), workers_, executor_, *tier_);
  executor_.set_crowded(true);
  RecordedLanding landing;
  const std::vector<std::string>& events = landing.events;
  mover.Land(kTenant, {{&good.header, &good.slot, 0}, {&bad.header, &bad.slot, 64}}, TestTarget(pages, {}),
             CancelFlag(), landing);
  executor_.Complete(0);
  EXPECT_THAT(events, ElementsAre("landed 1"));
  executor_.Complete(0);
  EXPECT_THAT(events, ElementsAre("landed 1", "landed 2"));
  executor_.Complete(0);
  EXPECT_THAT(events, ElementsAre("landed 1", "landed 2", "corrupt 1", std::string(Name(MissReason::kNone))));
  EXPECT_EQ(executor_.pending(), 0u);
  EXPECT_LT(LandingError(pages, good.header, good.text, 0), 1e-5);
}

// Several threads find at once that others wait.
TEST_P(MoverTest, YieldingThreadsLoseNoTask) {
  const Object first = Publish(1, 120), second = Publish(2, 120);
  kernels::ThreadPool threads(4);
  Mover mover(*GetParam(), threads, executor_, *tier_);
  executor_.set_crowded(true);
  for (int i = 0; i < 200; ++i) {
    const TestPages pages(32);
    RecordedLanding landing;
    mover.Land(kTenant, {{&first.header, &first.slot, 0}, {&second.header, &second.slot, 128}}, TestTarget(pages, {}),
               CancelFlag(), landing);
    executor_.CompleteAll();
    ASSERT_EQ(landing.done, MissReason::kNone);
    ASSERT_THAT(landing.corrupt, IsEmpty());
    ASSERT_LT(LandingError(pages, first.header, first.text, 0), 1e-5);
    ASSERT_LT(LandingError(pages, second.header, second.text, 128), 1e-5);
  }
}

TEST_P(MoverTest, OneItemPerLayerAndOneForTheRest) {
  const Object object = Publish(1, 64);
  const TestPages pages(8);
  const auto events = Land({{&object, 7}}, pages);
  for (const std::vector<uint32_t>& progress : {std::vector<uint32_t>{1}, {1, 2}, {1, 2}}) {
    EXPECT_FALSE(events->done);
    ASSERT_EQ(executor_.pending(), 1u);
    executor_.Complete(0);
    EXPECT_EQ(events->progress, progress);
  }
  EXPECT_EQ(executor_.pending(), 0u);
  EXPECT_EQ(events->done, MissReason::kNone);
}

TEST_P(MoverTest, ACancelledLandingWritesNothingMore) {
  const Object object = Publish(1, 64);
  TestPages pages(8);
  const CancelFlag cancel;
  const auto events = Land({{&object, 7}}, pages, cancel);
  executor_.Complete(0);
  ASSERT_THAT(events->progress, ElementsAre(1));
  const std::vector<float> before(pages.memory().begin(), pages.memory().end());
  cancel.Cancel();
  EXPECT_FALSE(events->done) << "the next layer is queued: not quiesced yet";
  executor_.CompleteAll();
  EXPECT_EQ(events->done, MissReason::kCancelled);
  EXPECT_THAT(events->corrupt, IsEmpty());
  EXPECT_TRUE(std::ranges::equal(before, pages.memory()));
}

TEST_P(MoverTest, CancellingStopsBetweenTheTasksOfALayer) {
  const Object first = Publish(1, 64), second = Publish(2, 64);
  TestPages pages(16);
  const CancelFlag cancel;
  std::vector<float> at_cancel;
  // Tasks of the first layer: the tuple's three parts, then keys and values, for each source in turn.
  workers_.before_task = [&](int64_t index) {
    if (index != 5) return;
    cancel.Cancel();
    at_cancel.assign(pages.memory().begin(), pages.memory().end());
  };
  const auto events = Land({{&first, 0}, {&second, 64}}, pages, cancel);
  executor_.CompleteAll();
  EXPECT_EQ(events->done, MissReason::kCancelled);
  EXPECT_THAT(events->corrupt, IsEmpty()) << "what was skipped is not known to be corrupt";
  ASSERT_THAT(at_cancel, SizeIs(pages.memory().size()));
  EXPECT_TRUE(std::ranges::any_of(at_cancel, [](float x) { return x != 0; }));
  EXPECT_TRUE(std::ranges::equal(at_cancel, pages.memory()));
}

TEST_P(MoverTest, ACancelledPublishHasNoHeader) {
  const ObjectHeader plan = TestPlan(1, 64);
  const Slot slot = *tier_->Allocate(1, plan.Extents());
  const CancelFlag cancel;
  bool done = false;
  std::optional<ObjectHeader> header;
  ASSERT_TRUE(mover_.Publish(plan, slot, TestSource(plan, 1), cancel, [&](std::optional<ObjectHeader> result) {
    done = true;
    header = std::move(result);
  }));
  cancel.Cancel();
  executor_.CompleteAll();
  EXPECT_TRUE(done);
  EXPECT_FALSE(header);
}

TEST_P(MoverTest, ReportsFullExecutorAtOnce) {
  const Object object = Publish(1, 64);
  const TestPages pages(8);
  executor_.set_capacity(0);
  EXPECT_FALSE(mover_.Publish(object.header, object.slot, TestSource(object.header, 1), CancelFlag(),
                              [](std::optional<ObjectHeader>) { FAIL(); }));
  EXPECT_EQ(Land({{&object, 0}}, pages)->done, MissReason::kBusy);

  executor_.set_capacity(1);
  const auto events = Land({{&object, 0}}, pages);
  executor_.set_capacity(0);
  executor_.Complete(0);
  EXPECT_THAT(events->progress, ElementsAre(1));
  EXPECT_EQ(events->done, MissReason::kBusy);
}

TEST_P(MoverTest, ReleasesEngineMemoryBeforeDone) {
  const Object object = Publish(1, 64);
  const TestPages pages(8);
  struct MappedLanding final : RecordedLanding {
    void Landed(uint32_t layers) override {
      EXPECT_FALSE(mapping.expired());
      RecordedLanding::Landed(layers);
    }
    void Ended(MissReason outcome) override {
      EXPECT_TRUE(mapping.expired());
      RecordedLanding::Ended(outcome);
    }
    std::weak_ptr<const void> mapping;
  };
  MappedLanding landing;
  LandTarget target = TestTarget(pages, {});
  landing.mapping = target.keep = std::make_shared<int>();
  mover_.Land(kTenant, {{&object.header, &object.slot, 0}}, std::move(target), CancelFlag(), landing);
  executor_.CompleteAll();
  EXPECT_EQ(landing.done, MissReason::kNone);
  EXPECT_THAT(landing.progress, Not(IsEmpty()));

  bool published = false;
  PublishSource source = TestSource(object.header, 1);
  const std::weak_ptr<const void> memory = source.keep;
  ASSERT_TRUE(
      mover_.Publish(object.header, object.slot, std::move(source), CancelFlag(), [&](std::optional<ObjectHeader>) {
        EXPECT_TRUE(memory.expired());
        published = true;
      }));
  EXPECT_FALSE(memory.expired());
  executor_.CompleteAll();
  EXPECT_TRUE(published);
}

INSTANTIATE_TEST_SUITE_P(BackEnds, MoverTest,
                         ::testing::ValuesIn(kernels::Available().begin(), kernels::Available().end()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::storage
