// SPDX-License-Identifier: Apache-2.0
// Many prompts and objects: as few calls as the limits allow, and no item fails because of another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/limits.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;

class Batching : public testing::Test {
 protected:
  void ExpectCalls(const std::string& method, double count) {
    const auto calls = [&](const std::string& code) {
      return daemon_.Metric("ashlar_rpcs_total{code=\"" + code + "\",method=\"" + method + "\"}");
    };
    const auto all = [&] { return calls("OK") + calls("INVALID_ARGUMENT"); };
    EXPECT_TRUE(Eventually([&] { return all() == count; })) << method << ": " << all() << " calls";
  }

  std::vector<Reservation> Reserve(const std::vector<Tokens>& runs) {
    std::vector<ObjectRun> objects;
    for (const Tokens& run : runs) objects.push_back({ObjectKind::kSegment, run});
    return engine_.model().Reserve(objects);
  }

  DaemonProcess daemon_;
  TestEngine engine_{daemon_.client_options()};
};

TEST_F(Batching, ObjectsArePublishedTogether) {
  const std::vector<Tokens> runs = MakePrompt(1, 2 * limits::kMaxObjectsPerCall + 2, 20);
  const std::vector<Reservation> reservations = Reserve(runs);
  ExpectCalls("Reserve", 3);
  const PublishParts parts = engine_.Compute(ObjectKind::kSegment, runs[7]);
  std::vector<Publication> objects;
  for (const Reservation& reservation : reservations) {
    ASSERT_TRUE(reservation.granted()) << Name(reservation.outcome);
    objects.push_back({reservation, parts});  // as if all runs had the same content
  }
  EXPECT_THAT(engine_.model().Publish(objects), Each(PublishOutcome::kPublished));
  ExpectCalls("Publish", 3);

  const std::vector<Tokens> prompt = {MakeRun(99, 10), runs[7], runs.back()};
  const Match match = engine_.Lookup(prompt);
  ASSERT_TRUE(match.segments()[1].hit() && match.segments()[2].hit());
  engine_.ExpectTuples(match, 1, runs[7]);
  engine_.ExpectTuples(match, 2, runs[7]);
}

TEST_F(Batching, ABadObjectIsRefusedAlone) {
  const std::vector<Tokens> runs = MakePrompt(2, 5, 30);
  std::vector<Reservation> reservations = Reserve(runs);
  const PublishParts good = engine_.Compute(ObjectKind::kSegment, runs[0]);
  PublishParts outside = good, composed = good, incomplete = good;
  outside.linear[0].state = engine_.region().data() + engine_.region().size() - 4;  // the client sees that
  composed.provenance = Provenance::kComposed;                                      // refused with the whole call
  incomplete.linear.pop_back();                                                     // refused individually
  const Publication objects[] = {{reservations[0], good},       {reservations[1], outside},  {Reservation(), good},
                                 {reservations[2], incomplete}, {reservations[3], composed}, {reservations[4], good}};
  EXPECT_THAT(engine_.model().Publish(objects),
              ElementsAre(PublishOutcome::kPublished, PublishOutcome::kBadSource, PublishOutcome::kUnknownReservation,
                          PublishOutcome::kBadSource, PublishOutcome::kBadSource, PublishOutcome::kPublished));
  ExpectCalls("Publish", 1 + 4);  // together, then each alone; two never left the client
  const Match match = engine_.Lookup({MakeRun(99, 10), runs[0], runs[4], runs[3]});
  EXPECT_TRUE(match.segments()[1].hit());
  EXPECT_TRUE(match.segments()[2].hit());
  EXPECT_EQ(match.segments()[3].reason, MissReason::kAbandoned) << "its reservation has ended";
}

TEST_F(Batching, PromptsOfManySegmentsAreCutIntoCalls) {
  const std::vector<Tokens> published = {MakeRun(1, 20), MakeRun(2, 30)};
  engine_.PublishPrompt(published);
  Tokens tokens = published[0];
  tokens.insert(tokens.end(), published[1].begin(), published[1].end());
  std::vector<uint64_t> lengths = {published[0].size(), published[1].size()};
  const Tokens others = MakeRun(3, limits::kMaxSegments - 2);
  tokens.insert(tokens.end(), others.begin(), others.end());
  lengths.insert(lengths.end(), others.size(), 1);
  constexpr size_t kInACall = limits::kMaxLookupsPerMatch / limits::kMaxSegments;
  const std::vector<Prompt> prompts(kInACall + 1, Prompt{tokens, lengths});

  const std::vector<Match> matches = engine_.model().Lookup(prompts);
  ExpectCalls("Match", 2);
  ASSERT_EQ(matches.size(), prompts.size());
  for (const Match& match : matches) {
    ASSERT_EQ(match.segments().size(), limits::kMaxSegments);
    EXPECT_TRUE(match.segments()[0].hit());
    EXPECT_TRUE(match.segments()[1].hit());
    EXPECT_EQ(match.segments()[2].reason, MissReason::kTooShort);
  }
}

TEST_F(Batching, ABadPromptIsMissedAlone) {
  const std::vector<Tokens> published = {MakeRun(1, 20), MakeRun(2, 30)};
  engine_.PublishPrompt(published);
  Tokens tokens = published[0];
  tokens.insert(tokens.end(), published[1].begin(), published[1].end());
  const std::vector<uint64_t> right = {20, 30}, beyond = {20, 31};
  const Prompt prompts[] = {{tokens, right}, {tokens, beyond}, {tokens, right}};
  const std::vector<Match> matches = engine_.model().Lookup(prompts);
  ASSERT_EQ(matches.size(), 3u);
  EXPECT_TRUE(matches[0].segments()[1].hit());
  EXPECT_EQ(matches[1].segments()[1].reason, MissReason::kInvalidRequest);
  EXPECT_TRUE(matches[2].segments()[1].hit());
}

}  // namespace
}  // namespace ashlar::integration
