// SPDX-License-Identifier: Apache-2.0
// ashlarctl status: a summary of a daemon's state in a few lines.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/summary.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr size_t kBarWidth = 24;
constexpr size_t kReasons = 3;

std::string ClusterLine(const v1::ClusterStats& cluster) {
  return absl::StrFormat("cluster   node %s: %d of %d peers connected; directory %s, %d entries; %s fetched\n",
                         cluster.node(), cluster.peers_connected(), PeersOf(cluster),
                         cluster.directory_connected() ? "connected" : "NOT connected", cluster.directory_entries(),
                         Bytes(cluster.fetched_bytes()));
}

json ClusterJson(const v1::StatsReply& stats) {
  const v1::ClusterStats& cluster = stats.cluster();
  return {{"node", cluster.node()},
          {"degraded", ClusterFault(stats)},
          {"members", cluster.members()},
          {"peers_connected", cluster.peers_connected()},
          {"directory_connected", cluster.directory_connected()},
          {"directory_entries", cluster.directory_entries()},
          {"fetched_objects", cluster.fetched_objects()},
          {"fetched_bytes", cluster.fetched_bytes()},
          {"failed_objects", cluster.failed_objects()},
          {"rdma_fallback", cluster.rdma_fallback()}};
}

}  // namespace

absl::StatusOr<Answer> Status(const Arguments&, AdminClient& client) {
  v1::StatsReply stats;
  if (absl::Status status = client.Stats(v1::StatsRequest(), &stats); !status.ok()) return status;
  const Tokens tokens = TokensOf(stats);
  Answer answer;
  answer.failed = std::string(StateOf(stats)) != "serving";
  answer.json = {{"state", StateOf(stats)},
                 {"version", stats.version()},
                 {"uptime_seconds", stats.uptime_seconds()},
                 {"sessions", stats.sessions()},
                 {"leases", stats.leases()},
                 {"landings", stats.landings()},
                 {"objects", stats.objects()},
                 {"object_bytes", stats.object_bytes()},
                 {"tokens", JsonOf(tokens)},
                 {"tiers", JsonOf(TiersOf(stats))},
                 {"degraded", json::array()},
                 {"cluster", stats.has_cluster() ? ClusterJson(stats) : json(nullptr)}};
  answer.text =
      absl::StrFormat("ashlard %s: %s, up %s\n", stats.version(), StateOf(stats), Duration(stats.uptime_seconds()));
  if (stats.cluster().rdma_fallback()) {
    answer.text += "fabric    cluster.expect_transport is rdma, but transfers do not use RDMA; the node is not ready\n";
  }
  for (const v1::DegradedTier& tier : stats.degraded()) {
    answer.json["degraded"].push_back({{"tier", TierName(tier.tier())}, {"reason", tier.reason()}});
    absl::StrAppendFormat(&answer.text, "degraded  %s: %s\n", TierName(tier.tier()), tier.reason());
  }
  if (const std::string fault = ClusterFault(stats); !fault.empty()) {
    absl::StrAppendFormat(&answer.text, "degraded  cluster: %s\n", fault);
  }
  for (const TierSum& tier : TiersOf(stats)) {
    absl::StrAppendFormat(&answer.text, "%-9s %s %s of %s\n", tier.tier,
                          Bar(tier.used_bytes, tier.capacity_bytes, kBarWidth), Bytes(tier.used_bytes),
                          Bytes(tier.capacity_bytes));
  }
  absl::StrAppendFormat(&answer.text, "hits      %s of %d tokens requested\n", Percent(tokens.hit(), tokens.asked()),
                        tokens.asked());
  const std::string worst = WorstMisses(tokens, kReasons);
  if (!worst.empty()) absl::StrAppend(&answer.text, "missed    ", worst, "\n");
  absl::StrAppendFormat(&answer.text, "engines   %d sessions, %d leases, %d landings in progress\n", stats.sessions(),
                        stats.leases(), stats.landings());
  absl::StrAppendFormat(&answer.text, "objects   %d, %s\n", stats.objects(), Bytes(stats.object_bytes()));
  if (stats.has_cluster()) answer.text += ClusterLine(stats.cluster());
  return answer;
}

}  // namespace ashlar::ctl
