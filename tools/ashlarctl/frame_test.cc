// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <clocale>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/summary.h"
#include "tools/ashlarctl/terminal.h"

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::StatsReply Stats(int tenants, uint64_t hit, uint64_t missed) {
  v1::StatsReply stats;
  stats.set_version("9.9");
  for (int i = 0; i < tenants; ++i) {
    v1::TenantStats* tenant = stats.add_tenants();
    tenant->set_tenant(absl::StrCat("näme-", i, "-longer-than-its-column"));
    v1::TierStats* tier = tenant->add_tiers();
    tier->set_tier(static_cast<uint32_t>(TierKind::kDram));
    tier->set_capacity_bytes(1000);
    tier->set_used_bytes(500);
    v1::Tally* hits = tenant->add_hits();
    hits->set_of(static_cast<uint32_t>(TierKind::kDram));
    hits->set_tokens(hit * (i + 1));
    v1::Tally* misses = tenant->add_misses();
    misses->set_of(static_cast<uint32_t>(MissReason::kEvicted));
    misses->set_tokens(missed);
  }
  return stats;
}

TEST(Frame, FitsTheScreen) {
  const v1::StatsReply before = Stats(30, 10, 10), now = Stats(30, 40, 20);
  for (const size_t columns : {1u, 20u, 40u, 80u, 200u}) {
    for (const size_t rows : {1u, 5u, 12u, 24u, 100u}) {
      const std::string frame = Frame(before, now, 2, {.columns = columns, .rows = rows});
      std::vector<std::string> lines = absl::StrSplit(frame, '\n');
      lines.pop_back();
      EXPECT_LE(lines.size(), rows);
      for (const std::string& line : lines) {
        EXPECT_LE(WidthOf(line), columns) << line;
      }
    }
  }
}

TEST(Frame, FitsSixtyColumnsWithWideNamesAndHidesNoCharacter) {
  ASSERT_NE(std::setlocale(LC_CTYPE, "C.UTF-8"), nullptr);
  v1::StatsReply before = Stats(1, 10, 10), now = Stats(1, 4000000, 2000000);
  for (v1::StatsReply* each : {&before, &now})
    each->mutable_tenants(0)->set_tenant("模型的租户很长很长很长很长\xe2\x80\xae");
  std::vector<std::string> lines = absl::StrSplit(Frame(before, now, 2, {.columns = 60, .rows = 24}), '\n');
  for (const std::string& line : lines) EXPECT_LE(WidthOf(line), 60u) << line;
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("…"))) << "what does not fit is marked";
  now.mutable_tenants(0)->set_tenant(
      "a\xe2\x80\xae"
      "b");
  EXPECT_THAT(Frame(before, now, 2, {}), HasSubstr("a\\xe2\\x80\\xaeb"));
}

TEST(Frame, ShowsTheIntervalWithTheBusiestTenantsFirst) {
  const std::string frame = Frame(Stats(3, 10, 10), Stats(3, 40, 20), 2, {.columns = 120, .rows = 24});
  // 30 × (1 + 2 + 3) tokens hit and 3 × 10 missed, in 2 seconds.
  EXPECT_THAT(frame, HasSubstr("hit 90  missed 15  hit rate 85.7 %"));
  EXPECT_THAT(frame, HasSubstr("evicted 14.3 %"));
  EXPECT_LT(frame.find("näme-2"), frame.find("näme-1"));
  EXPECT_THAT(frame, Not(HasSubstr("\033"))) << "colour was not requested";
  EXPECT_THAT(Frame(Stats(3, 1, 1), Stats(3, 1, 1), 2, {.colour = true}), HasSubstr("\033"));
  EXPECT_THAT(Frame(Stats(9, 1, 1), Stats(9, 2, 2), 1, {.rows = 8}), HasSubstr("and 8 more"));
}

TEST(Frame, TheJsonHasWhatTheFrameShows) {
  v1::StatsReply now = Stats(2, 4, 2);
  now.set_uptime_seconds(61);
  now.set_landings(3);
  now.set_metadata_queue(5);
  const nlohmann::json frame = FrameJson(Stats(2, 2, 2), now, 1);
  EXPECT_EQ(frame["version"], "9.9");
  EXPECT_EQ(frame["uptime_seconds"], 61);
  EXPECT_EQ(frame["landings"], 3);
  EXPECT_EQ(frame["metadata_queue"], 5);
  const auto tiers = [](uint64_t capacity, uint64_t used) {
    return nlohmann::json::array(
        {{{"tier", "dram"}, {"capacity_bytes", capacity}, {"used_bytes", used}, {"held_bytes", 0}}});
  };
  EXPECT_EQ(frame["tiers"], tiers(2000, 1000));
  EXPECT_EQ(frame["tenants"][1]["tiers"], tiers(1000, 500));
}

TEST(Frame, ARestartedDaemonStartsAtZero) {
  const nlohmann::json frame = FrameJson(Stats(1, 1000, 10), Stats(1, 5, 5), 1);
  EXPECT_EQ(frame["tokens"]["asked_tokens"], 10);
  EXPECT_EQ(frame["tenants"][0]["tokens"]["hits"]["dram"], 5);
}

TEST(Summary, ANodeWithoutPeersIsDegraded) {
  v1::StatsReply stats = Stats(1, 1, 1);
  v1::ClusterStats& cluster = *stats.mutable_cluster();
  cluster.set_directory_connected(true);
  cluster.set_members(1);
  EXPECT_EQ(ClusterFault(stats), "") << "it is the first node";
  cluster.set_members(4);
  EXPECT_EQ(PeersOf(cluster), 3u);
  EXPECT_EQ(ClusterFault(stats), "0 of 3 peers are connected");
  EXPECT_STREQ(StateOf(stats), "degraded");
  cluster.set_peers_connected(2);
  EXPECT_STREQ(StateOf(stats), "serving");
  cluster.set_directory_connected(false);
  EXPECT_EQ(ClusterFault(stats), "etcd is not reachable");
  EXPECT_STREQ(StateOf(stats), "degraded");
}

TEST(Summary, TheStateIsTheWorstCondition) {
  v1::StatsReply stats = Stats(1, 1, 1);
  EXPECT_STREQ(StateOf(stats), "serving");
  stats.add_degraded()->set_reason("full");
  EXPECT_STREQ(StateOf(stats), "degraded");
  stats.set_draining(true);
  EXPECT_STREQ(StateOf(stats), "draining");
  EXPECT_EQ(Bar(1, 2, 12), "[#####-----]");
  EXPECT_EQ(Bar(9, 3, 6), "[####]") << "never beyond its end";
  EXPECT_EQ(Bar(1, 0, 6), "[----]");
}

}  // namespace
}  // namespace ashlar::ctl
