// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/status_board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/observe/metrics.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Levels BusyLevels() {
  Levels levels;
  levels.tiers[TierKind::kDram] = {{.capacity_bytes = 1000, .used_bytes = 300, .held_bytes = 400},
                                   {.capacity_bytes = 1000, .used_bytes = 200, .held_bytes = 400}};
  levels.objects = 7;
  levels.sessions = 2;
  return levels;
}

// Checks that every element except void ones is closed, in order.
void ExpectWellFormed(const std::string& page) {
  std::vector<std::string> open;
  const std::regex tag("<(/?)([a-zA-Z0-9]+)[^>]*?(/?)>");
  for (std::sregex_iterator at(page.begin(), page.end(), tag), end; at != end; ++at) {
    const std::string name = (*at)[2];
    if (name == "meta" || (*at)[3] == "/") continue;
    if ((*at)[1] != "/") {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty()) << name;
    ASSERT_EQ(open.back(), name);
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

TEST(StatusBoard, SumsOverTenantsWithoutNames) {
  std::vector<Tallies> tallies(2);
  tallies[0].hits[TierKind::kDram] = {.segments = 1, .tokens = 60};
  tallies[1].hits[TierKind::kDram] = {.segments = 1, .tokens = 15};
  tallies[1].misses[MissReason::kEvicted] = {.segments = 1, .tokens = 25};
  tallies[0].evictions[{TierKind::kDram, PolicyKind::kLru, MissReason::kEvicted}] = {.objects = 3, .bytes = 2048};
  const std::string page = StatusPage(ViewOf(BusyLevels(), tallies));
  ExpectWellFormed(page);
  EXPECT_THAT(page, HasSubstr("500 B of 2.0 KiB"));
  EXPECT_THAT(page, HasSubstr("100 requested since startup"));
  EXPECT_THAT(page, HasSubstr("found in dram</th><td>"));
  EXPECT_THAT(page, HasSubstr("75.0 %"));
  EXPECT_THAT(page, HasSubstr("missed: evicted"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">3</td><td class=\"n\">2.0 KiB</td>"));
  EXPECT_THAT(page, HasSubstr("serving"));
  EXPECT_THAT(page, Not(HasSubstr("peers</th>"))) << "a node that is alone has none";
}

TEST(StatusBoard, SumsPoolsOverTenants) {
  Levels levels = BusyLevels();
  levels.pools[{TierKind::kDram, {0, storage::PoolKind::kPublic}}] = {.used_bytes = 300};
  levels.pools[{TierKind::kDram, {1, storage::PoolKind::kPublic}}] = {.used_bytes = 100};
  levels.pools[{TierKind::kDram, {1, storage::PoolKind::kPrivate}}] = {.used_bytes = 100, .floor_bytes = 2048};
  EXPECT_THAT(StatusPage(ViewOf(levels, {})), Not(HasSubstr("pages of engines")));
  levels.pages = {{.pages = 10, .free = 7}, {.pages = 10, .free = 8}};
  const std::string page = StatusPage(ViewOf(levels, {}));
  ExpectWellFormed(page);
  EXPECT_THAT(page, HasSubstr("dram, public</th>"));
  EXPECT_THAT(page, HasSubstr("aria-label=\"20.0 %\"")) << "of both tenants' budgets";
  EXPECT_THAT(page, HasSubstr("400 B</td>"));
  EXPECT_THAT(page, HasSubstr("100 B, floor 2.0 KiB</td>"));
  EXPECT_THAT(page, HasSubstr("5 of 20</td>"));
}

TEST(StatusBoard, ShowsAgeOfMiss) {
  using std::chrono::minutes, std::chrono::seconds, std::chrono::hours;
  const StatusView::Clock::time_point now = StatusView::Clock::now();
  StatusView view;
  view.misses = {{.reason = MissReason::kEvicted, .tokens = 11, .at = now - seconds(5)},
                 {.reason = MissReason::kExpired, .tokens = 33, .at = now - minutes(10)},
                 {.reason = MissReason::kNeverSeen, .tokens = 22, .at = now - hours(2)}};
  const std::string page = StatusPage(view, now);
  ExpectWellFormed(page);
  EXPECT_THAT(page, HasSubstr("evicted</th><td>segment</td><td class=\"n\">11 tokens</td><td class=\"n\">5 s ago"));
  EXPECT_THAT(page, HasSubstr("33 tokens</td><td class=\"n\">10 min ago"));
  EXPECT_THAT(page, HasSubstr("22 tokens</td><td class=\"n\">2 h ago"));
}

TEST(StatusBoard, ShowsTheLatestMissesNewestFirst) {
  StatusBoard board;
  for (uint64_t tokens = 101; tokens <= 120; ++tokens) {
    board.Missed(ObjectKind::kCheckpoint, MissReason::kBusy, tokens);
  }
  EXPECT_THAT(board.Page(), Not(HasSubstr("120 tokens"))) << "the view was taken before";
  board.Set(ViewOf(BusyLevels(), {}));
  const std::string page = board.Page();
  ExpectWellFormed(page);
  EXPECT_LT(page.find("120 tokens"), page.find("109 tokens"));
  EXPECT_THAT(page, HasSubstr("109 tokens"));
  EXPECT_THAT(page, Not(HasSubstr("108 tokens"))) << "twelve are shown";
  EXPECT_THAT(page, HasSubstr("busy</th><td>checkpoint</td>"));
}

TEST(StatusBoard, ShowsDegradedTiers) {
  Levels levels = BusyLevels();
  levels.tiers[TierKind::kSsd] = {{.capacity_bytes = 1, .used_bytes = 1, .held_bytes = 1}};
  levels.degraded[TierKind::kSsd] = "<b>full</b> & \"read-only\"";
  levels.cluster.members = 3;
  levels.cluster.peers_connected = 1;
  std::string page = StatusPage(ViewOf(levels, {}));
  ExpectWellFormed(page);
  EXPECT_THAT(page, HasSubstr("degraded: &lt;b&gt;full&lt;/b&gt; &amp; &quot;read-only&quot;"));
  EXPECT_THAT(page, HasSubstr("<span class=\"bad\">degraded</span>"));
  EXPECT_THAT(page, HasSubstr("1 of 2 connected"));
  EXPECT_THAT(page, HasSubstr("not connected"));
  levels.cluster.rdma_fallback = true;
  page = StatusPage(ViewOf(levels, {}));
  EXPECT_THAT(page, HasSubstr("<title>Ashlar: not ready</title>"));
  EXPECT_THAT(page, HasSubstr(kRdmaFallback));
  levels.draining = true;
  page = StatusPage(ViewOf(levels, {}));
  EXPECT_THAT(page, HasSubstr("<title>Ashlar: draining</title>"));
}

TEST(StatusBoard, LoadsNoExternalResources) {
  const std::string page = StatusPage(ViewOf(BusyLevels(), {}));
  for (const char* foreign : {"<script", "http://", "https://", "<link", "<img", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(foreign)));
  }
  for (const char* landmark : {"<header>", "<main>", "<footer>", "lang=\"en\"", "name=\"viewport\""}) {
    EXPECT_THAT(page, HasSubstr(landmark));
  }
}

// Every part of the page, with the longest texts. tests/deploy/status_page_test.py renders it in a browser.
TEST(StatusBoard, WritesACompletePageForTheBrowserTest) {
  Levels levels = BusyLevels();
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kSsd}) {
    levels.tiers[tier] = {{.capacity_bytes = uint64_t{1000} << 30, .used_bytes = uint64_t{999} << 30}};
    for (const storage::PoolKind pool : {storage::PoolKind::kPublic, storage::PoolKind::kPrivate}) {
      levels.pools[{tier, {0, pool}}] = {.used_bytes = uint64_t{900} << 30, .floor_bytes = uint64_t{1000} << 30};
    }
  }
  levels.degraded[TierKind::kSsd] = "pwrite: No space left on device: /var/lib/ashlar/records/000001.sst";
  levels.pages = {{.pages = 1'000'000, .free = 1}};
  levels.objects = levels.memory_only_bytes = levels.object_bytes = uint64_t{999} << 40;
  levels.cluster.rdma_fallback = true;
  levels.cluster.members = 300;
  std::vector<Tallies> tallies(1);
  for (int i = 1; i <= static_cast<int>(MissReason::kHolderUnreachable); ++i) {
    const auto reason = static_cast<MissReason>(i);
    tallies[0].misses[reason] = {.segments = 1, .tokens = 123'456'789};
    tallies[0].evictions[{TierKind::kDram, PolicyKind::kPrice, reason}] = {.objects = 123'456'789, .bytes = 999 << 20};
  }
  tallies[0].hits[TierKind::kDram] = {.segments = 1, .tokens = 123'456'789};
  StatusBoard board;
  for (uint64_t i = 0; i < StatusView::kMisses; ++i) {
    board.Missed(ObjectKind::kCheckpoint, MissReason::kNamespaceDiffers, 1'000'000);
  }
  board.Set(ViewOf(levels, tallies));
  const std::string page = board.Page();
  ExpectWellFormed(page);
  EXPECT_THAT(page, HasSubstr(absl::StrCat("fabric</th><td class=\"t\">", kRdmaFallback)));
  if (const char* file = std::getenv("ASHLAR_STATUS_PAGE"); file != nullptr) std::ofstream(file) << page;
}

}  // namespace
}  // namespace ashlar::daemon
