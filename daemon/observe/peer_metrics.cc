// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/peer_metrics.h"

#include <set>

namespace ashlar::daemon {

void PeerMetrics::Count::Reach(uint64_t count) {
  counter->Increment(static_cast<double>(count < seen ? count : count - seen));
  seen = count;
}

PeerMetrics::PeerMetrics(prometheus::Registry& registry)
    : rates_(prometheus::BuildGauge()
                 .Name("ashlar_peer_bandwidth_bytes_per_second")
                 .Help("Measured bandwidth of copies from a peer; 0: none")
                 .Register(registry)),
      rtts_(prometheus::BuildGauge()
                .Name("ashlar_peer_rtt_seconds")
                .Help("Measured round-trip time of a call to a peer; 0: none")
                .Register(registry)),
      bytes_(prometheus::BuildCounter()
                 .Name("ashlar_peer_bytes_total")
                 .Help("Bytes of objects received from and sent to a peer")
                 .Register(registry)),
      failures_(prometheus::BuildCounter()
                    .Name("ashlar_peer_failures_total")
                    .Help("Unanswered calls, lost connections and stalled copies of a peer")
                    .Register(registry)) {}

PeerMetrics::Node& PeerMetrics::Find(const std::string& node) {
  const auto [found, is_new] = nodes_.try_emplace(node);
  Node& its = found->second;
  if (!is_new) return its;
  its.rate = &rates_.Add({{"peer", node}});
  its.rtt = &rtts_.Add({{"peer", node}});
  its.fetched.counter = &bytes_.Add({{"peer", node}, {"direction", "received"}});
  its.given.counter = &bytes_.Add({{"peer", node}, {"direction", "sent"}});
  its.calls.counter = &failures_.Add({{"peer", node}, {"type", "call"}});
  its.connections.counter = &failures_.Add({{"peer", node}, {"type", "connection"}});
  its.stalls.counter = &failures_.Add({{"peer", node}, {"type", "stall"}});
  return its;
}

void PeerMetrics::Remove(const Node& node) {
  rates_.Remove(node.rate);
  rtts_.Remove(node.rtt);
  for (const Count& each : {node.fetched, node.given}) bytes_.Remove(each.counter);
  for (const Count& each : {node.calls, node.connections, node.stalls}) failures_.Remove(each.counter);
}

void PeerMetrics::Set(const std::vector<PeerFigures>& peers) {
  std::set<std::string> present;
  for (const PeerFigures& peer : peers) {
    present.insert(peer.node);
    Node& its = Find(peer.node);
    its.rate->Set(peer.bytes_per_second);
    its.rtt->Set(peer.rtt_seconds);
    its.fetched.Reach(peer.received_bytes);
    its.given.Reach(peer.sent_bytes);
    its.calls.Reach(peer.failed_calls);
    its.connections.Reach(peer.lost_connections);
    its.stalls.Reach(peer.stalls);
  }
  std::erase_if(nodes_, [&](const auto& each) {
    if (present.contains(each.first)) return false;
    Remove(each.second);
    return true;
  });
}

}  // namespace ashlar::daemon
