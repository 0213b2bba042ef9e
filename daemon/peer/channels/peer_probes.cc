// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/channels/peer_probes.h"

#include "daemon/peer/channels/call_failure.h"

namespace ashlar::daemon {

void PeerProbes::Tick() {
  const storage::Nanos now = clock_.Now();
  if (now - looked_at_ < kEvery) return;
  looked_at_ = now;
  const std::set<std::string> failing = rates_.Failing();
  std::erase_if(probes_, [&](const auto& each) { return !each.second.under_way && !failing.contains(each.first); });
  if (failing.empty()) return;
  for (const std::shared_ptr<const Member>& member : directory_.Members()) {
    if (!failing.contains(member->node)) continue;
    Probe& probe = probes_[member->node];
    if (probe.under_way || probe.not_before > now) continue;
    probe.under_way = true;
    // Renewing a lease that the node has never granted changes nothing there.
    asker_.Renew(*member, {.leases = {PeerLease{}}, .lease_ms = 1},
                 [this, node = member->node](const absl::StatusOr<std::vector<uint32_t>>& reply) {
                   loop_.PostCompletion(storage::kNoTenant,
                                        [this, node, status = reply.status()] { Ended(node, status); });
                 });
  }
}

// A refusal is a reply too.
void PeerProbes::Ended(const std::string& node, const absl::Status& status) {
  if (status.ok() || WhatFailed(status) != CallFailure::kNode) rates_.Healed(node);
  probes_[node] = {.under_way = false, .not_before = clock_.Now() + kPause};
}

}  // namespace ashlar::daemon
