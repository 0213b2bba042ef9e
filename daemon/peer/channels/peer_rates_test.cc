// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/channels/peer_rates.h"

#include <gtest/gtest.h>

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr RoundTrips::Bounds kBounds{kSecond, 20 * kSecond};
constexpr uint64_t kPiece = 1 << 20;

TEST(RoundTripsTest, LimitFollowsMeasurements) {
  RoundTrips trips;
  EXPECT_EQ(trips.Limit(kBounds), kSecond);
  for (int i = 0; i < 100; ++i) trips.Answered(500 * kMillisecond);
  EXPECT_NEAR(static_cast<double>(trips.Limit(kBounds)), 2.0 * kSecond, 0.1 * kSecond);
  EXPECT_NEAR(static_cast<double>(trips.mean()), 500.0 * kMillisecond, kMillisecond);
  for (int i = 0; i < 100; ++i) trips.Answered(kMillisecond);
  EXPECT_EQ(trips.Limit(kBounds), kSecond) << "a link that is fast again is not waited for";
}

TEST(RoundTripsTest, UnansweredCallsDoubleTheTimeoutUpToABound) {
  RoundTrips trips;
  storage::Nanos now = 0;
  for (const storage::Nanos limit : {1, 2, 4, 8, 16, 20, 20}) {
    EXPECT_EQ(trips.Limit(kBounds), limit * kSecond);
    const storage::Nanos began = now;
    now += trips.Limit(kBounds);
    for (int i = 0; i < 64; ++i) trips.Unanswered(began, now);  // all concurrent calls
  }
  for (int i = 0; i < 1000; ++i) trips.Unanswered(now, now + i);
  EXPECT_EQ(trips.Limit(kBounds), 20 * kSecond);
  trips.Answered(kMillisecond);
  EXPECT_EQ(trips.Limit(kBounds), kSecond);
}

TEST(PeerRatesTest, ReportsNodeFigures) {
  PeerRates rates;
  EXPECT_EQ(rates.Of("a").bytes_per_second, 0);
  for (int i = 0; i < 3; ++i) rates.Answered("a", 2 * kMillisecond);
  rates.Came("a", kPiece, kSecond / 2);
  rates.Used("a", kPiece);
  rates.Failed("a");
  rates.Failed("a");
  rates.Abandoned("a", 0, kSecond);
  rates.Answered("a", 2 * kMillisecond);
  const PeerRates::Figures figures = rates.Of("a");
  EXPECT_NEAR(figures.bytes_per_second, 2.0 * kPiece, 1);
  EXPECT_EQ(figures.rtt, 2 * kMillisecond);
  EXPECT_EQ(figures.failed_calls, 2u) << "also those before an answer";
  EXPECT_EQ(figures.stalls, 1u);
  EXPECT_EQ(figures.bytes, kPiece);
}

TEST(PeerRatesTest, DepartedNodesAreErasedOnceNoCallsAreInFlight) {
  PeerRates rates;
  for (const char* node : {"a", "b", "c"}) rates.Came(node, kPiece, kSecond);
  rates.Begins("c", kPiece, 0);
  rates.Keep({"a"});
  EXPECT_GT(rates.Estimate("a", kPiece), 0);
  EXPECT_EQ(rates.Estimate("b", kPiece), 0) << "nothing is known of it any more";
  EXPECT_GT(rates.Estimate("c", kPiece), 0);
  rates.Ends("c", kPiece, 0);
  rates.Keep({"a"});
  EXPECT_EQ(rates.Estimate("c", kPiece), 0);
}

TEST(PeerRatesTest, ANearNodesTimeoutDoesNotGrow) {
  PeerRates rates;
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), kSecond);
  rates.Answered("a", kMillisecond);
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), kSecond);
  rates.Came("a", kPiece, kMillisecond);
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), kSecond);
}

// Over a new connection with 400 ms each way, handshakes and TCP's first windows take more than 4 s before the first
// piece can arrive, without a lost frame.
TEST(PeerRatesTest, ADistantNodesFirstPieceIncludesConnectionTime) {
  PeerRates rates;
  for (int i = 0; i < 3; ++i) rates.Answered("far", 800 * kMillisecond);
  EXPECT_GT(rates.Patience("far", 4096, 8, kBounds), 8 * kSecond);
  EXPECT_LE(rates.Patience("far", kPiece, 8, kBounds), kBounds.most);
}

TEST(PeerRatesTest, TimeoutsIncludePiecesInFlight) {
  PeerRates rates;
  rates.Answered("a", kMillisecond);
  rates.Came("a", kPiece, 100 * kMillisecond);
  const storage::Nanos alone = rates.Patience("a", kPiece, 8, kBounds);
  for (int i = 0; i < 9; ++i) rates.Begins("a", kPiece, 0);
  EXPECT_NEAR(static_cast<double>(rates.Patience("a", kPiece, 8, kBounds)), 8.0 * kSecond, 0.2 * kSecond);
  for (int i = 0; i < 9; ++i) rates.Ends("a", kPiece, 0);
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), alone);
}

TEST(PeerRatesTest, ASlowLinkIsDetectedBeforeTheFirstPieceArrives) {
  constexpr uint64_t kObject = 8 * kPiece, kMessage = kPiece / 4;
  PeerRates rates;
  rates.Answered("a", kMillisecond);
  for (int i = 0; i < 8; ++i) rates.Begins("a", kPiece, kSecond);  // at 10 Mbit/s
  rates.Moved("a", 0, kSecond + 5 * kMillisecond);
  EXPECT_EQ(rates.Transfer("a", kObject, kSecond + 5 * kMillisecond), 0) << "too early to say";
  rates.Moved("a", 0, kSecond + 150 * kMillisecond);
  EXPECT_GT(rates.Transfer("a", kObject, kSecond + 150 * kMillisecond), 3 * kSecond) << "less than a message came";
  for (int i = 1; i <= 4; ++i) rates.Moved("a", kMessage, kSecond + i * 210 * kMillisecond);
  const storage::Nanos measured = kSecond + 840 * kMillisecond;
  EXPECT_NEAR(static_cast<double>(rates.Transfer("a", kObject, measured)), 5.4 * kSecond, 0.2 * kSecond);
  for (int i = 0; i < 8; ++i) rates.Ends("a", kPiece, measured);
  for (int i = 0; i < 3; ++i) rates.Answered("a", 300 * kMillisecond);  // calls wait after the copies
  EXPECT_GT(rates.Transfer("a", kObject, measured + kSecond), kSecond) << "lookups know it";
  EXPECT_EQ(rates.Transfer("a", kObject, measured + 60 * kSecond), 0) << "it may be another link by now";
}

TEST(PeerRatesTest, CopiesThatShareAFastLinkDoNotMakeItSlow) {
  PeerRates rates;
  storage::Nanos now = kSecond;
  for (int i = 0; i < 16; ++i) rates.Begins("a", kPiece, now);
  for (int i = 0; i < 16; ++i) rates.Moved("a", kPiece, now += kMillisecond);  // each waits for the ones before it
  EXPECT_NEAR(static_cast<double>(rates.Transfer("a", kPiece, now)), 1.0 * kMillisecond, 0.1 * kMillisecond);
  rates.Moved("a", 0, now += 100 * kMillisecond);
  EXPECT_LT(rates.Transfer("a", kPiece, now), 10 * kMillisecond) << "one pause says little";
}

TEST(PeerRatesTest, AnAbandonedPieceRaisesTheNextTimeout) {
  PeerRates rates;
  rates.Answered("a", kMillisecond);
  rates.Abandoned("a", 0, kSecond);
  rates.Abandoned("a", 0, kSecond);  // another one with the same duration
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), 2 * kSecond);
  rates.Abandoned("a", kSecond, 3 * kSecond);
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), 4 * kSecond);
  rates.Came("a", kPiece, kMillisecond);
  EXPECT_EQ(rates.Patience("a", kPiece, 8, kBounds), kSecond);
}

}  // namespace
}  // namespace ashlar::daemon
