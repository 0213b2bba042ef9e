// SPDX-License-Identifier: Apache-2.0
// PeerMetrics: what this node knows of each other one, for Prometheus.
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

// Figures of another node, as this one knows them. Counts are since this node met it first, at most since it started.
struct PeerFigures {
  std::string node, version;
  std::string control_address, transport_address;
  bool connected = false;       // for calls
  std::string path, lanes;      // how bytes are fetched from it, and what UCX carries them over; empty: none were yet
  double bytes_per_second = 0;  // as measured, of single copies; 0: none has come yet
  double journey_seconds = 0;   // of a call and its answer, as measured; 0: none was answered
  uint64_t fetched_bytes = 0, given_bytes = 0;  // of objects, from it and to it
  uint64_t failed_calls = 0, lost_connections = 0, stalls = 0;
  uint64_t held_there = 0, held_there_bytes = 0;  // objects that it keeps for this node now
  uint64_t held_here = 0, held_here_bytes = 0;    // that this node keeps for it
};

// One thread. A node that is not among the figures has no series, so that there are never more nodes than members.
class PeerMetrics {
 public:
  explicit PeerMetrics(prometheus::Registry& registry);
  void Set(const std::vector<PeerFigures>& peers);

 private:
  // Follows a count that is kept elsewhere, and may begin anew there.
  struct Count {
    prometheus::Counter* counter = nullptr;
    uint64_t seen = 0;
    void Reach(uint64_t count);
  };
  struct Node {
    prometheus::Gauge *rate = nullptr, *journey = nullptr;
    Count fetched, given, calls, connections, stalls;
  };
  Node& Find(const std::string& node);
  void Remove(const Node& node);

  prometheus::Family<prometheus::Gauge>&rates_, &journeys_;
  prometheus::Family<prometheus::Counter>&bytes_, &failures_;
  std::map<std::string, Node> nodes_;
};

}  // namespace ashlar::daemon
