// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/frame.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/summary.h"
#include "tools/ashlarctl/terminal.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr size_t kShownReasons = 4;
constexpr size_t kNameColumns = 16;

struct TenantRow {
  std::string name;
  Tokens tokens;  // tokens of the interval
  std::vector<TierSum> tiers;
};

std::vector<TenantRow> RowsOf(const v1::StatsReply& before, const v1::StatsReply& now) {
  std::vector<TenantRow> rows;
  for (const v1::TenantStats& tenant : now.tenants()) {
    Tokens earlier;
    for (const v1::TenantStats& other : before.tenants()) {
      if (other.tenant() == tenant.tenant()) earlier = TokensOf(other);
    }
    rows.push_back({tenant.tenant(), TokensOf(tenant).Since(earlier), TiersOf(tenant)});
  }
  std::ranges::stable_sort(rows, std::greater<>(), [](const TenantRow& row) { return row.tokens.asked(); });
  return rows;
}

std::string Rate(uint64_t count, double seconds) {
  return absl::StrFormat("%.0f", static_cast<double>(count) / std::max(seconds, 1e-3));
}

std::string Coloured(const std::string& line, const char* code, const Screen& screen) {
  return screen.colour ? absl::StrCat("\033[", code, "m", line, "\033[0m") : line;
}

std::vector<std::string> Head(const v1::StatsReply& stats, const Tokens& tokens, double seconds, const Screen& screen) {
  const auto cut = [&](const std::string& line) { return Cut(Printable(line), screen.columns); };
  const std::string state = StateOf(stats);
  std::vector<std::string> lines;
  lines.push_back(
      Coloured(cut(absl::StrFormat("ashlard %s  %s  up %s  sessions %d  leases %d  landings %d  queue %d",
                                   stats.version(), state, Duration(stats.uptime_seconds()), stats.sessions(),
                                   stats.leases(), stats.landings(), stats.metadata_queue())),
               state == "serving" ? "1" : "1;31", screen));
  for (const TierSum& tier : TiersOf(stats)) {
    const size_t bar = std::clamp<size_t>(screen.columns / 3, 3, 40);
    lines.push_back(
        cut(absl::StrFormat("%-5s %s %s of %s, %s held", tier.tier, Bar(tier.used_bytes, tier.capacity_bytes, bar),
                            Bytes(tier.used_bytes), Bytes(tier.capacity_bytes), Bytes(tier.held_bytes))));
  }
  lines.push_back(cut(absl::StrFormat("tokens/s  hit %s  missed %s  hit rate %s  evicted %s objects/s",
                                      Rate(tokens.hit(), seconds), Rate(tokens.asked() - tokens.hit(), seconds),
                                      Percent(tokens.hit(), tokens.asked()), Rate(tokens.evicted_objects, seconds))));
  const std::string worst = WorstMisses(tokens, kShownReasons);
  lines.push_back(cut(absl::StrCat("missed    ", worst.empty() ? "nothing" : worst)));
  return lines;
}

}  // namespace

std::string Frame(const v1::StatsReply& before, const v1::StatsReply& now, double seconds, const Screen& screen) {
  std::vector<std::string> lines = Head(now, TokensOf(now).Since(TokensOf(before)), seconds, screen);
  lines.emplace_back();
  lines.push_back(Coloured(
      Cut(absl::StrFormat("%-16s %9s %9s %7s  %s", "TENANT", "hit/s", "missed/s", "rate", "used"), screen.columns), "7",
      screen));
  const std::vector<TenantRow> rows = RowsOf(before, now);
  size_t shown = 0;
  for (const TenantRow& row : rows) {
    const bool last = lines.size() + 1 >= screen.rows;
    if (last && shown + 1 < rows.size()) break;
    std::string used;
    for (const TierSum& tier : row.tiers) {
      absl::StrAppend(&used, used.empty() ? "" : ", ", tier.tier, " ", Bytes(tier.used_bytes));
    }
    lines.push_back(
        Cut(absl::StrFormat("%s %9s %9s %7s  %s", Padded(Printable(row.name), kNameColumns),
                            Rate(row.tokens.hit(), seconds), Rate(row.tokens.asked() - row.tokens.hit(), seconds),
                            Percent(row.tokens.hit(), row.tokens.asked()), used),
            screen.columns));
    ++shown;
  }
  if (shown < rows.size()) lines.push_back(Cut(absl::StrCat("and ", rows.size() - shown, " more"), screen.columns));
  lines.resize(std::min(lines.size(), std::max<size_t>(screen.rows, 1)));
  std::string frame;
  for (const std::string& line : lines) absl::StrAppend(&frame, line, "\n");
  return frame;
}

json FrameJson(const v1::StatsReply& before, const v1::StatsReply& now, double seconds) {
  json frame = {{"seconds", seconds},
                {"state", StateOf(now)},
                {"version", now.version()},
                {"uptime_seconds", now.uptime_seconds()},
                {"sessions", now.sessions()},
                {"leases", now.leases()},
                {"landings", now.landings()},
                {"metadata_queue", now.metadata_queue()},
                {"tiers", JsonOf(TiersOf(now))},
                {"tokens", JsonOf(TokensOf(now).Since(TokensOf(before)))},
                {"tenants", json::array()}};
  for (const TenantRow& row : RowsOf(before, now)) {
    frame["tenants"].push_back({{"tenant", row.name}, {"tiers", JsonOf(row.tiers)}, {"tokens", JsonOf(row.tokens)}});
  }
  return frame;
}

}  // namespace ashlar::ctl
