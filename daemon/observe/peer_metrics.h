// SPDX-License-Identifier: Apache-2.0
// PeerMetrics: Prometheus metrics of each other node.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ashlar::daemon {

// Figures of another node as this node sees it. Counters start when this node first sees the other one.
struct PeerFigures {
  std::string node, version;
  std::string control_address, transport_address;
  bool connected = false;                       // connected for calls
  std::string path, lanes;                      // transport for fetches and UCX lanes; empty before the first fetch
  double bytes_per_second = 0;                  // measured throughput of single copies; 0 before the first copy
  double rtt_seconds = 0;                       // measured round-trip time of a call; 0 before the first reply
  uint64_t received_bytes = 0, sent_bytes = 0;  // object bytes received from it and sent to it
  uint64_t failed_calls = 0, lost_connections = 0, stalls = 0;
  uint64_t held_there = 0, held_there_bytes = 0;  // objects that it holds for this node
  uint64_t held_here = 0, held_here_bytes = 0;    // objects that this node holds for it
};

// One thread only. A node without figures has no series, so there are never more series than members.
class PeerMetrics {
 public:
  explicit PeerMetrics(prometheus::Registry& registry);
  void Set(const std::vector<PeerFigures>& peers);

 private:
  // Follows a count that is kept elsewhere and may restart at 0.
  struct Count {
    prometheus::Counter* counter = nullptr;
    uint64_t seen = 0;
    void Reach(uint64_t count);
  };
  struct Node {
    prometheus::Gauge *rate = nullptr, *rtt = nullptr;
    Count fetched, given, calls, connections, stalls;
  };
  Node& Find(const std::string& node);
  void Remove(const Node& node);

  prometheus::Family<prometheus::Gauge>&rates_, &rtts_;
  prometheus::Family<prometheus::Counter>&bytes_, &failures_;
  std::map<std::string, Node> nodes_;
};

}  // namespace ashlar::daemon
