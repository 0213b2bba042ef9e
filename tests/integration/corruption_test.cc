// SPDX-License-Identifier: Apache-2.0
// Corrupt bytes in the daemon's memory are detected, and never landed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;

class Corruption : public testing::Test {
 protected:
  Corruption() { engine_.PublishPrompt(prompt_); }

  // Segment `corrupt` is a hit with corrupt bytes: landing misses it and lands the others. Afterwards the copy is gone,
  // and the segment can be published again.
  void ExpectMissed(size_t corrupt) {
    const Match match = engine_.Lookup(prompt_);
    ASSERT_TRUE(match.segments()[corrupt].hit());  // no engine has read it yet
    engine_.FillTargets(std::byte{0});
    const std::vector<MissReason> verdict = engine_.Land(match, prompt_).Wait(kPatience);
    for (size_t i = 0; i < prompt_.size(); ++i) {
      EXPECT_EQ(verdict[i], i == corrupt ? MissReason::kChecksumFailed : MissReason::kNone) << i;
    }
    const Match after = engine_.Lookup(prompt_);
    for (size_t i = 0; i < prompt_.size(); ++i) {
      EXPECT_EQ(after.segments()[i].reason, i == corrupt ? MissReason::kChecksumFailed : MissReason::kNone) << i;
    }
    EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_checksum_failures_total{tenant=\"default\"}") == 1; }));
    engine_.Publish(KindOfSegment(corrupt), prompt_[corrupt]);
    EXPECT_THAT(engine_.Land(engine_.Lookup(prompt_), prompt_).Wait(kPatience), Each(MissReason::kNone));
  }

  DaemonProcess daemon_;
  TestEngine engine_{daemon_.client_options()};
  const std::vector<Tokens> prompt_ = MakePrompt(4, 4, 90);
};

TEST_F(Corruption, CorruptValuesAreDetected) {
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.ValueRow(ObjectKind::kSegment, prompt_[2], 3, 50)), 1);
  ExpectMissed(2);
}

TEST_F(Corruption, CorruptTuplesAreDetected) {
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.StateOfHead(ObjectKind::kSegment, prompt_[1], 2, 3)), 1);
  ExpectMissed(1);
}

TEST_F(Corruption, IsDetectedByTupleOnlyLanding) {
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.StateOfHead(ObjectKind::kSegment, prompt_[1], 2, 3)), 1);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.ValueRow(ObjectKind::kSegment, prompt_[2], 3, 50)), 1);
  const Match match = engine_.Lookup(prompt_);
  std::vector<LandSegment> all;
  for (uint32_t i = 0; i < prompt_.size(); ++i) all.push_back({.segment = i, .tuples_only = true});
  EXPECT_THAT(engine_.model().Land(match, {}, all).Wait(kPatience),
              ElementsAre(MissReason::kNone, MissReason::kChecksumFailed, MissReason::kNone, MissReason::kNone));
  EXPECT_EQ(engine_.Land(match, prompt_).Wait(kPatience)[2], MissReason::kChecksumFailed)
      << "the landing that reads them fails";
}

TEST_F(Corruption, CorruptCheckpointIsDetected) {
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.StateOfHead(ObjectKind::kCheckpoint, prompt_[0], 0, 0)), 1);
  ExpectMissed(0);
}

TEST_F(Corruption, CorruptHeaderIsImmediateMiss) {
  ASSERT_EQ(FlipInArenas(daemon_.pid(), "AshlarOb"), static_cast<int>(prompt_.size()));
  const Match match = engine_.Lookup(prompt_);
  for (const SegmentResult& segment : match.segments()) EXPECT_EQ(segment.reason, MissReason::kChecksumFailed);
  EXPECT_EQ(match.prefix_depth(), 0u);
  EXPECT_EQ(match.tuples(1), nullptr);
  EXPECT_THAT(engine_.Land(match, prompt_).Wait(kPatience), Each(MissReason::kChecksumFailed));
  EXPECT_TRUE(Eventually([&] {
    return daemon_.Metric("ashlar_checksum_failures_total{tenant=\"default\"}") == static_cast<double>(prompt_.size());
  }));
  engine_.PublishPrompt(prompt_);
  EXPECT_THAT(engine_.Land(engine_.Lookup(prompt_), prompt_).Wait(kPatience), Each(MissReason::kNone));
}

// The daemon found the header valid; the engine that reads it does not, and publishes at once.
TEST_F(Corruption, CorruptLeasedHeaderIsMissOnAttach) {
  const Match match = engine_.Lookup(prompt_);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), "AshlarOb"), static_cast<int>(prompt_.size()));
  TestEngine second(daemon_.client_options());
  const std::vector<uint64_t> lengths(prompt_.size(), prompt_[0].size());
  const Match attached = second.model().Attach(match.lease(), lengths);
  for (const SegmentResult& segment : attached.segments()) EXPECT_EQ(segment.reason, MissReason::kChecksumFailed);
  second.PublishPrompt(prompt_);
  EXPECT_THAT(second.Land(second.Lookup(prompt_), prompt_).Wait(kPatience), Each(MissReason::kNone));
}

}  // namespace
}  // namespace ashlar::integration
