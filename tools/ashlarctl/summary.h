// SPDX-License-Identifier: Apache-2.0
// The sums of a StatsReply, over all tenants or in an interval between two replies.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ashlar/v1/admin.pb.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {

struct TierSum {
  std::string tier;
  uint64_t capacity_bytes = 0, used_bytes = 0, held_bytes = 0;
};

struct Tokens {
  std::map<std::string, uint64_t> hits;    // keyed by tier
  std::map<std::string, uint64_t> misses;  // keyed by reason
  uint64_t evicted_objects = 0;

  uint64_t hit() const;
  uint64_t asked() const;  // hit or missed
  // The tokens since `before`; all of them if the daemon restarted meanwhile.
  Tokens Since(const Tokens& before) const;
};

Tokens TokensOf(const v1::TenantStats& tenant);
Tokens TokensOf(const v1::StatsReply& stats);
std::vector<TierSum> TiersOf(const v1::StatsReply& stats);  // top to bottom
std::vector<TierSum> TiersOf(const v1::TenantStats& tenant);

// Returns the nodes of the cluster other than this one.
uint64_t PeersOf(const v1::ClusterStats& cluster);
// Returns why this node cannot use the cluster: etcd is not reachable, or no other node is connected. Empty if it can,
// or if the node has no cluster.
std::string ClusterFault(const v1::StatsReply& stats);
// "serving", "draining", "not ready" if RDMA is expected but another protocol is in use, or "degraded" if a tier takes
// no writes or ClusterFault is not empty.
const char* StateOf(const v1::StatsReply& stats);
// "[####------]", `width` characters in all.
std::string Bar(uint64_t part, uint64_t whole, size_t width);
// The miss reasons that cost most tokens, "never_seen 12.0 %, evicted 1.0 %": at most `most`, relative to all requests.
std::string WorstMisses(const Tokens& tokens, size_t most);

nlohmann::json JsonOf(const Tokens& tokens);
nlohmann::json JsonOf(const std::vector<TierSum>& tiers);

}  // namespace ashlar::ctl
