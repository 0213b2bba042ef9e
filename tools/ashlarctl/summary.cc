// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/summary.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

uint64_t Sum(const std::map<std::string, uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0},
                         [](uint64_t sum, const auto& item) { return sum + item.second; });
}

std::map<std::string, uint64_t> Less(std::map<std::string, uint64_t> counts,
                                     const std::map<std::string, uint64_t>& before) {
  for (const auto& [name, count] : before) counts[name] -= std::min(count, counts[name]);
  return counts;
}

void Add(const v1::TenantStats& tenant, std::vector<TierSum>& sums) {
  for (const v1::TierStats& tier : tenant.tiers()) {
    const std::string name = TierName(tier.tier());
    auto sum = std::ranges::find(sums, name, &TierSum::tier);
    if (sum == sums.end()) sum = sums.insert(sums.end(), {.tier = name});
    sum->capacity_bytes += tier.capacity_bytes();
    sum->used_bytes += tier.used_bytes();
    sum->held_bytes += tier.held_bytes();
  }
}

void Add(const v1::TenantStats& tenant, Tokens& tokens) {
  for (const v1::Tally& hits : tenant.hits()) tokens.hits[TierName(hits.of())] += hits.tokens();
  for (const v1::Tally& misses : tenant.misses()) tokens.misses[ReasonName(misses.of())] += misses.tokens();
  for (const v1::Eviction& eviction : tenant.evictions()) tokens.evicted_objects += eviction.objects();
}

}  // namespace

uint64_t Tokens::hit() const {
  return Sum(hits);
}

uint64_t Tokens::asked() const {
  return Sum(hits) + Sum(misses);
}

Tokens Tokens::Since(const Tokens& before) const {
  if (asked() < before.asked() || evicted_objects < before.evicted_objects) return *this;
  return {.hits = Less(hits, before.hits),
          .misses = Less(misses, before.misses),
          .evicted_objects = evicted_objects - before.evicted_objects};
}

Tokens TokensOf(const v1::TenantStats& tenant) {
  Tokens tokens;
  Add(tenant, tokens);
  return tokens;
}

Tokens TokensOf(const v1::StatsReply& stats) {
  Tokens tokens;
  for (const v1::TenantStats& tenant : stats.tenants()) Add(tenant, tokens);
  return tokens;
}

std::vector<TierSum> TiersOf(const v1::StatsReply& stats) {
  std::vector<TierSum> sums;
  for (const v1::TenantStats& tenant : stats.tenants()) Add(tenant, sums);
  return sums;
}

std::vector<TierSum> TiersOf(const v1::TenantStats& tenant) {
  std::vector<TierSum> sums;
  Add(tenant, sums);
  return sums;
}

uint64_t PeersOf(const v1::ClusterStats& cluster) {
  return cluster.members() == 0 ? 0 : cluster.members() - 1;
}

std::string ClusterFault(const v1::StatsReply& stats) {
  if (!stats.has_cluster()) return "";
  const v1::ClusterStats& cluster = stats.cluster();
  if (!cluster.directory_connected()) return "etcd is not reachable";
  if (PeersOf(cluster) == 0 || cluster.peers_connected() > 0) return "";
  return absl::StrCat("0 of ", PeersOf(cluster), " peers are connected");
}

const char* StateOf(const v1::StatsReply& stats) {
  if (stats.draining()) return "draining";
  if (stats.cluster().rdma_fallback()) return "not ready";
  return stats.degraded().empty() && ClusterFault(stats).empty() ? "serving" : "degraded";
}

std::string Bar(uint64_t part, uint64_t whole, size_t width) {
  if (width < 3) return "";
  const size_t inner = width - 2;
  const double share = whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
  const size_t full = std::min(inner, static_cast<size_t>(share * static_cast<double>(inner) + 0.5));
  return absl::StrCat("[", std::string(full, '#'), std::string(inner - full, '-'), "]");
}

std::string WorstMisses(const Tokens& tokens, size_t most) {
  std::vector<std::pair<uint64_t, std::string>> reasons;
  for (const auto& [reason, count] : tokens.misses) {
    if (count > 0) reasons.emplace_back(count, reason);
  }
  std::ranges::sort(reasons, std::greater<>());
  std::string text;
  for (size_t i = 0; i < std::min(most, reasons.size()); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", reasons[i].second, " ", Percent(reasons[i].first, tokens.asked()));
  }
  return text;
}

json JsonOf(const Tokens& tokens) {
  return {{"hit_tokens", tokens.hit()},
          {"asked_tokens", tokens.asked()},
          {"hits", tokens.hits},
          {"misses", tokens.misses},
          {"evicted_objects", tokens.evicted_objects}};
}

json JsonOf(const std::vector<TierSum>& tiers) {
  json out = json::array();
  for (const TierSum& tier : tiers) {
    out.push_back({{"tier", tier.tier},
                   {"capacity_bytes", tier.capacity_bytes},
                   {"used_bytes", tier.used_bytes},
                   {"held_bytes", tier.held_bytes}});
  }
  return out;
}

}  // namespace ashlar::ctl
