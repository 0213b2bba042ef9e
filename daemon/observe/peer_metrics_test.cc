// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/peer_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class PeerMetricsTest : public testing::Test {
 protected:
  std::string Shown() const { return prometheus::TextSerializer().Serialize(registry_.Collect()); }

  prometheus::Registry registry_;
  PeerMetrics metrics_{registry_};
};

TEST_F(PeerMetricsTest, EachNodeHasItsOwnFigures) {
  metrics_.Set({{.node = "a", .bytes_per_second = 2e9, .rtt_seconds = 0.25, .received_bytes = 700, .stalls = 3},
                {.node = "b", .sent_bytes = 900, .failed_calls = 4, .lost_connections = 5}});
  const std::string shown = Shown();
  for (const char* line :
       {"ashlar_peer_bandwidth_bytes_per_second{peer=\"a\"} 2000000000", "ashlar_peer_rtt_seconds{peer=\"a\"} 0.25",
        "ashlar_peer_bytes_total{direction=\"received\",peer=\"a\"} 700",
        "ashlar_peer_bytes_total{direction=\"sent\",peer=\"b\"} 900",
        "ashlar_peer_failures_total{peer=\"a\",type=\"stall\"} 3",
        "ashlar_peer_failures_total{peer=\"b\",type=\"call\"} 4",
        "ashlar_peer_failures_total{peer=\"b\",type=\"connection\"} 5"}) {
    EXPECT_THAT(shown, HasSubstr(line));
  }
}

TEST_F(PeerMetricsTest, NonMembersHaveNoSeries) {
  metrics_.Set({{.node = "a", .received_bytes = 700}, {.node = "b"}});
  metrics_.Set({{.node = "b"}});
  EXPECT_THAT(Shown(), Not(HasSubstr("peer=\"a\"")));
  EXPECT_THAT(Shown(), HasSubstr("peer=\"b\""));
  metrics_.Set({{.node = "a", .received_bytes = 800}});
  EXPECT_THAT(Shown(), HasSubstr("direction=\"received\",peer=\"a\"} 800"));
}

TEST_F(PeerMetricsTest, ACountThatRestartsAddsToItsTotal) {
  for (const uint64_t bytes : {700, 50, 60}) metrics_.Set({{.node = "a", .received_bytes = bytes}});
  EXPECT_THAT(Shown(), HasSubstr("direction=\"received\",peer=\"a\"} 760"));
}

}  // namespace
}  // namespace ashlar::daemon
