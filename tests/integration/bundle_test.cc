// SPDX-License-Identifier: Apache-2.0
// Ranks of a tensor-parallel engine, each in a separate session: an object is a hit for all of them or for none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;

constexpr size_t kSegments = 3, kTokens = 60;
const std::vector<uint64_t> kLengths(kSegments, kTokens);

std::unique_ptr<TestEngine> Rank(const DaemonProcess& daemon, uint32_t rank, uint32_t size = 2) {
  return std::make_unique<TestEngine>(daemon.client_options(), Shape{.shard = {.rank = rank, .size = size}});
}

std::vector<MissReason> Reasons(const Match& match) {
  std::vector<MissReason> reasons;
  for (const SegmentResult& segment : match.segments()) reasons.push_back(segment.reason);
  return reasons;
}

void ExpectAllThere(TestEngine& rank, const Match& match, const std::vector<Tokens>& prompt) {
  rank.FillTargets(std::byte{7});
  EXPECT_THAT(rank.Land(match, prompt).Wait(kPatience), Each(MissReason::kNone));
  for (size_t i = 0; i < kSegments; ++i) {
    rank.ExpectTuples(match, i, prompt[i]);
    rank.ExpectLanded(KindOfSegment(i), prompt[i], i * kTokens, std::byte{7});
  }
}

TEST(Bundles, HitWhenEveryRankHasPublished) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(1, kSegments, kTokens);
  const auto first = Rank(daemon, 0), second = Rank(daemon, 1);
  ASSERT_EQ(first->model().ns(), second->model().ns());
  first->PublishPrompt(prompt);
  EXPECT_THAT(Reasons(first->Lookup(prompt)), Each(MissReason::kBeingPublished));
  EXPECT_THAT(Reasons(second->Lookup(prompt)), Each(MissReason::kBeingPublished));
  second->PublishPrompt(prompt);

  std::optional<Match> found = first->Lookup(prompt);
  ASSERT_THAT(Reasons(*found), Each(MissReason::kNone));
  EXPECT_EQ(found->prefix_depth(), kTokens);
  std::optional<Match> attached = second->model().Attach(found->lease(), kLengths);
  ASSERT_THAT(Reasons(*attached), Each(MissReason::kNone));
  EXPECT_NE(attached->lease(), found->lease());
  ExpectAllThere(*first, *found, prompt);
  found.reset();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 1; }));
  ExpectAllThere(*second, *attached, prompt);
  attached.reset();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 0; }));
}

TEST(Bundles, AShardLandsOnlyInPagesOfItsRank) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(2, kSegments, kTokens);
  const auto first = Rank(daemon, 0), second = Rank(daemon, 1);
  first->PublishPrompt(prompt);
  second->PublishPrompt(prompt);
  const Match match = first->Lookup(prompt);
  ASSERT_THAT(Reasons(match), Each(MissReason::kNone));
  auto other = first->client().OpenModel(TestEngine::identity(), first->Whole(),
                                         {.tensor_parallel_rank = 1, .tensor_parallel_size = 2});
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(other->DeclarePages(first->region(), first->pages()).ok());
  first->FillTargets(std::byte{7});
  const std::vector<LandSegment> all = {{0, 0}, {1, kTokens}, {2, 2 * kTokens}};
  EXPECT_THAT(other->Land(match, first->target_table(), all).Wait(kPatience), Each(MissReason::kInvalidRequest));
  EXPECT_TRUE(first->TargetsAre(std::byte{7}));
}

TEST(Bundles, ARankPublishesOnlyFromItsOwnPages) {
  DaemonProcess daemon;
  const Tokens run = MakeRun(4, kTokens);
  const auto rank = Rank(daemon, 0);
  auto other = rank->client().OpenModel(TestEngine::identity(), rank->Whole(),
                                        {.tensor_parallel_rank = 1, .tensor_parallel_size = 2});
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(other->DeclarePages(rank->region(), rank->pages()).ok());
  const ObjectRun object{ObjectKind::kCheckpoint, run};
  const Reservation reservation = other->Reserve(std::span(&object, 1)).front();
  ASSERT_TRUE(reservation.granted());
  // The reservation is rank 1's, the pages that this model has declared are rank 0's.
  EXPECT_EQ(rank->model().Publish(reservation, rank->Compute(object.kind, run)), PublishOutcome::kBadSource);
}

TEST(Bundles, ALeaseThatIsAttachedWithOtherLengthsIsReleased) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(5, kSegments, kTokens);
  const auto first = Rank(daemon, 0), second = Rank(daemon, 1);
  first->PublishPrompt(prompt);
  second->PublishPrompt(prompt);
  const Match found = first->Lookup(prompt);
  EXPECT_THAT(Reasons(second->model().Attach(found.lease(), std::vector<uint64_t>{kTokens})),
              Each(MissReason::kInvalidRequest));
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 1; }));
}

TEST(Bundles, ARankThatDiesLeavesTheOthersWithMisses) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(3, 1, kTokens);
  const auto first = Rank(daemon, 0);
  auto second = Rank(daemon, 1);
  first->PublishPrompt(prompt);
  ASSERT_TRUE(second->Reserve(ObjectKind::kCheckpoint, prompt[0]).granted());
  second.reset();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_reservations_pending") == 0; }));
  EXPECT_THAT(Reasons(first->Lookup(prompt)), Each(MissReason::kBeingPublished));
  second = Rank(daemon, 1);
  second->PublishPrompt(prompt);
  EXPECT_THAT(Reasons(first->Lookup(prompt)), Each(MissReason::kNone));
}

}  // namespace
}  // namespace ashlar::integration
