// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/status_board.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "daemon/observe/metrics.h"
#include "proto/version.h"

namespace ashlar::daemon {
namespace {

// Colours have a contrast of at least 4.5 to the background, in light and dark mode.
constexpr const char* kStyle =
    ":root{color-scheme:light dark;--ink:#1b1b1b;--ground:#fff;--line:#767676;--bar:#1a5fb4;--bad:#a51d2d}"
    "@media(prefers-color-scheme:dark){:root{--ink:#eee;--ground:#161616;--line:#8f8f8f;--bar:#62a0ea;--bad:#ff7b63}}"
    "body{font:16px/1.4 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:60rem;margin:0 auto;"
    "padding:.5rem}h1{font-size:1.3rem}h2{font-size:1.1rem;margin:1.2rem 0 .3rem}"
    "table{border-collapse:collapse;width:100%}caption{text-align:left}"
    "th,td{text-align:left;padding:.15rem .5rem .15rem 0;border-bottom:1px solid var(--line);font-weight:normal;"
    "overflow-wrap:anywhere}td.n,td.t{text-align:right}td.n{white-space:nowrap}"
    "svg{width:100%;min-width:4rem;height:.8rem;display:block}.bad{color:var(--bad);font-weight:bold}";

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string Bytes(uint64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : std::min(1.0, static_cast<double>(part) / static_cast<double>(whole));
}

std::string Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? "–" : absl::StrFormat("%.1f %%", 100 * Share(part, whole));
}

std::string Bar(uint64_t part, uint64_t whole) {
  return absl::StrFormat(
      "<svg viewBox=\"0 0 100 8\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"%s\"><rect width=\"100\" "
      "height=\"8\" fill=\"none\" stroke=\"var(--line)\"/><rect width=\"%.1f\" height=\"8\" "
      "fill=\"var(--bar)\"/></svg>",
      Percent(part, whole), 100 * Share(part, whole));
}

std::string Number(const std::string& text) {
  return absl::StrCat("<td class=\"n\">", text, "</td>");
}

// A value that may span several lines.
std::string Text(const std::string& text) {
  return absl::StrCat("<td class=\"t\">", Escaped(text), "</td>");
}

std::string Row(const std::string& name, const std::string& cells) {
  return absl::StrCat("<tr><th scope=\"row\">", Escaped(name), "</th>", cells, "</tr>");
}

std::string Table(const std::string& heading, const std::string& caption, const std::string& rows) {
  return absl::StrCat("<section><h2>", heading, "</h2><table><caption>", caption, "</caption><tbody>", rows,
                      "</tbody></table></section>");
}

std::string Tiers(const StatusView& view) {
  std::string rows;
  for (const StatusView::Tier& tier : view.tiers) {
    absl::StrAppend(
        &rows,
        Row(tier.name, absl::StrCat("<td>", Bar(tier.used_bytes, tier.capacity_bytes), "</td>",
                                    Number(absl::StrCat(Bytes(tier.used_bytes), " of ", Bytes(tier.capacity_bytes))))));
    if (tier.degraded.empty()) continue;
    absl::StrAppend(
        &rows, Row("", absl::StrCat("<td colspan=\"2\" class=\"bad\">degraded: ", Escaped(tier.degraded), "</td>")));
  }
  return Table("Tiers", "used, of the budgets of all tenants", rows);
}

std::string Pools(const StatusView& view) {
  std::string rows;
  const auto row = [&rows](const std::string& name, uint64_t part, uint64_t whole, const std::string& text) {
    absl::StrAppend(&rows, Row(name, absl::StrCat("<td>", Bar(part, whole), "</td>", Text(text))));
  };
  for (const StatusView::Pool& pool : view.pools) {
    const std::string floor = pool.floor_bytes == 0 ? "" : absl::StrCat(", floor ", Bytes(pool.floor_bytes));
    row(pool.name, pool.used_bytes, pool.capacity_bytes, absl::StrCat(Bytes(pool.used_bytes), floor));
  }
  if (view.pages > 0) {
    const uint64_t used = view.pages - view.free_pages;
    row("pages of engines", used, view.pages, absl::StrCat(used, " of ", view.pages));
  }
  return Table("Pools", "public: shared segments; private: states of conversations; pages that engines share", rows);
}

std::string Ago(StatusView::Clock::duration age) {
  const double seconds = std::chrono::duration<double>(age).count();
  if (seconds < 90) return absl::StrFormat("%.0f s ago", seconds);
  if (seconds < 90 * 60) return absl::StrFormat("%.0f min ago", seconds / 60);
  return absl::StrFormat("%.0f h ago", seconds / 3600);
}

std::string Misses(const StatusView& view, StatusView::Clock::time_point now) {
  std::string rows;
  for (const StatusView::Miss& miss : view.misses) {
    absl::StrAppend(&rows, Row(std::string(Name(miss.reason)),
                               absl::StrCat("<td>", Name(miss.kind), "</td>",
                                            Number(absl::StrCat(miss.tokens, " tokens")), Number(Ago(now - miss.at)))));
  }
  return Table("Latest misses", "newest first, all tenants", rows);
}

std::string Reuse(const StatusView& view) {
  uint64_t asked = 0;
  std::vector<std::pair<uint64_t, std::string>> parts;
  for (const auto& [tier, tally] : view.tallies.hits) {
    parts.emplace_back(tally.tokens, absl::StrCat("found in ", Name(tier)));
    asked += tally.tokens;
  }
  const size_t found = parts.size();
  for (const auto& [reason, tally] : view.tallies.misses) {
    parts.emplace_back(tally.tokens, absl::StrCat("missed: ", Name(reason)));
    asked += tally.tokens;
  }
  std::sort(parts.begin() + static_cast<ptrdiff_t>(found), parts.end(), std::greater<>());
  std::string rows;
  for (const auto& [tokens, name] : parts) {
    absl::StrAppend(&rows,
                    Row(name, absl::StrCat("<td>", Bar(tokens, asked), "</td>", Number(Percent(tokens, asked)))));
  }
  return Table("Tokens", absl::StrCat(asked, " requested since startup"), rows);
}

std::string Evictions(const StatusView& view) {
  std::string rows;
  for (const auto& [why, tally] : view.tallies.evictions) {
    absl::StrAppend(&rows, Row(absl::StrCat(Name(std::get<TierKind>(why)), ": ", Name(std::get<MissReason>(why)),
                                            " by ", Name(std::get<PolicyKind>(why))),
                               absl::StrCat(Number(absl::StrCat(tally.objects)), Number(Bytes(tally.bytes)))));
  }
  return Table("Evictions by reason", "objects and bytes since startup", rows);
}

std::string Now(const StatusView& view) {
  std::string rows;
  const auto row = [&rows](const std::string& name, const std::string& value) {
    absl::StrAppend(&rows, Row(name, Text(value)));
  };
  row("objects", absl::StrCat(view.objects, ", ", Bytes(view.object_bytes)));
  row("engines", absl::StrCat(view.sessions, " sessions"));
  row("leases, landings in flight", absl::StrCat(view.leases, ", ", view.landings));
  row("in memory only", Bytes(view.memory_only_bytes));
  row("disk queue", absl::StrCat(view.disk_queue));
  if (view.rdma_fallback) row("fabric", kRdmaFallback);
  if (view.peers.members > 0) {
    row("peers", absl::StrCat(view.peers.connected, " of ", view.peers.members - 1, " connected"));
    row("directory",
        view.peers.directory_connected ? absl::StrCat(view.peers.directory_entries, " entries") : "not connected");
    row("fetched from peers", Bytes(view.peers.fetched_bytes));
  }
  return Table("Now", "current counts", rows);
}

// Called after the tiers are added, whose sums are the capacities.
void AddPools(const Levels& levels, StatusView* view) {
  std::map<std::pair<TierKind, storage::PoolKind>, storage::PoolShare> sums;
  for (const auto& [place, share] : levels.pools) {
    storage::PoolShare& sum = sums[{place.first, place.second.kind}];
    sum.used_bytes += share.used_bytes;
    sum.floor_bytes += share.floor_bytes;
  }
  for (const auto& [place, sum] : sums) {
    const std::string tier(Name(place.first));
    const auto of = std::ranges::find(view->tiers, tier, &StatusView::Tier::name);
    view->pools.push_back({.name = absl::StrCat(tier, ", ", Name(place.second)),
                           .used_bytes = sum.used_bytes,
                           .floor_bytes = sum.floor_bytes,
                           .capacity_bytes = of == view->tiers.end() ? 0 : of->capacity_bytes});
  }
  for (const storage::PagePool::Levels& pages : levels.pages) {
    view->pages += pages.pages;
    view->free_pages += pages.free;
  }
}

}  // namespace

StatusView ViewOf(const Levels& levels, const std::vector<Tallies>& tallies) {
  StatusView view{.draining = levels.draining,
                  .rdma_fallback = levels.cluster.rdma_fallback,
                  .objects = levels.objects,
                  .object_bytes = levels.object_bytes,
                  .sessions = levels.sessions,
                  .leases = levels.leases,
                  .landings = levels.landings,
                  .memory_only_bytes = levels.memory_only_bytes,
                  .disk_queue = levels.disk_queue,
                  .peers = {.members = levels.cluster.members,
                            .connected = levels.cluster.peers_connected,
                            .directory_entries = levels.cluster.directory_entries,
                            .fetched_bytes = levels.cluster.fetched_bytes,
                            .directory_connected = levels.cluster.directory_connected}};
  for (const auto& [kind, usages] : levels.tiers) {
    StatusView::Tier tier{.name = std::string(Name(kind))};
    for (const storage::TierUsage& usage : usages) {
      tier.used_bytes += usage.used_bytes;
      tier.held_bytes += usage.held_bytes;
      tier.capacity_bytes += usage.capacity_bytes;
    }
    const auto degraded = levels.degraded.find(kind);
    if (degraded != levels.degraded.end()) tier.degraded = degraded->second;
    view.tiers.push_back(std::move(tier));
  }
  AddPools(levels, &view);
  const auto add = [](auto& sums, const auto& counts, auto first, auto second) {
    for (const auto& [key, tally] : counts) {
      sums[key].*first += tally.*first;
      sums[key].*second += tally.*second;
    }
  };
  for (const Tallies& tenant : tallies) {
    add(view.tallies.hits, tenant.hits, &Tallies::Segments::segments, &Tallies::Segments::tokens);
    add(view.tallies.misses, tenant.misses, &Tallies::Segments::segments, &Tallies::Segments::tokens);
    add(view.tallies.evictions, tenant.evictions, &Tallies::Objects::objects, &Tallies::Objects::bytes);
  }
  return view;
}

std::string StatusPage(const StatusView& view, StatusView::Clock::time_point now) {
  const bool degraded =
      std::ranges::any_of(view.tiers, [](const StatusView::Tier& tier) { return !tier.degraded.empty(); });
  const std::string state = view.draining        ? "draining"
                            : view.rdma_fallback ? "not ready"
                            : degraded           ? "degraded"
                                                 : "serving";
  return absl::StrCat(
      "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><meta http-equiv=\"refresh\" content=\"10\"><title>Ashlar: ",
      state, "</title><style>", kStyle, "</style></head><body><header><h1>ashlard ", Version(), ": <span",
      state == "serving" ? "" : " class=\"bad\"", ">", state, "</span></h1></header><main>", Tiers(view), Pools(view),
      Reuse(view), Misses(view, now), Evictions(view), Now(view),
      "</main><footer><p>All tenants together. <code>ashlarctl explain --last 20</code> lists misses; "
      "<a href=\"/metrics\">metrics</a>.</p></footer></body></html>\n");
}

void StatusBoard::Missed(ObjectKind kind, MissReason reason, uint64_t tokens) {
  misses_.push_front({.kind = kind, .reason = reason, .tokens = tokens, .at = StatusView::Clock::now()});
  if (misses_.size() > StatusView::kMisses) misses_.pop_back();
}

void StatusBoard::Set(StatusView view) {
  view.misses = misses_;
  MutexLock lock(mutex_);
  view_ = std::move(view);
}

std::string StatusBoard::Page() const {
  StatusView view;
  {
    MutexLock lock(mutex_);
    view = view_;
  }
  return StatusPage(view);
}

}  // namespace ashlar::daemon
