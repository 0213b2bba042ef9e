// SPDX-License-Identifier: Apache-2.0
// ClusterMetrics: Prometheus metrics of a node's work with other nodes. Outside a cluster, all families exist with
// value 0.
#pragma once

#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/observe/peer_metrics.h"

namespace ashlar::daemon {

// Erasures that at least one present node has not acknowledged.
struct PendingErasures {
  uint64_t count = 0;
  double oldest_seconds = 0;  // age of the oldest one, as this node has observed it
};

// Why a node with `rdma_fallback` is not ready.
inline constexpr const char* kRdmaFallback = "cluster.expect_transport is rdma, but transfers do not use RDMA";

// A snapshot. Counters start at 0 when the daemon starts.
struct ClusterFigures {
  uint64_t members = 0, peers_connected = 0;
  std::vector<std::pair<std::string, uint64_t>> refusals;  // (reason, count) pairs
  bool directory_connected = false;
  uint64_t directory_entries = 0, directory_bytes = 0, directory_queued = 0;
  uint64_t directory_dropped = 0, directory_resyncs = 0;
  PendingErasures erasures_here, erasures_elsewhere;                  // waiting for this node, and for other nodes
  uint64_t opened = 0, missed = 0, failed = 0, joined = 0, late = 0;  // objects requested from peers; late: lookups
  uint64_t fetched_bytes = 0, failed_pieces = 0, moved = 0;
  uint64_t hedges_won = 0, hedges_lost = 0;  // pieces that were requested from a second node
  struct Offered {
    std::string reason, outcome;
    uint64_t objects = 0;
  };
  std::vector<Offered> offers;  // `reason` is "received" for offers of other nodes
  bool transferring = false;
  uint64_t offered_bytes = 0, taken_bytes = 0;  // bytes that others took, and that this node took
  uint64_t peer_readers = 0, peer_leases = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;
  uint64_t transport_grants = 0, transport_transfers = 0, transport_loans = 0;
  uint64_t transport_refused = 0, transport_malformed = 0;
  uint64_t peers_by_am = 0, peers_by_rma = 0;     // connected nodes by transport
  uint64_t read_bytes = 0, registered_bytes = 0;  // bytes read by RDMA from peers; bytes in arenas that peers may read
  bool rdma_fallback = false;
  int64_t certificate_expiry = 0;       // Unix time; 0 if peers need no certificate
  int64_t certificate_seconds = 0;      // lifetime of the certificate
  int64_t etcd_certificate_expiry = 0;  // Unix time; 0 without a client certificate for etcd
  int64_t etcd_certificate_seconds = 0;
  std::vector<PeerFigures> peers;  // other members by name; at most PeerChannels::kMostPeers
};

class ClusterMetrics {
 public:
  explicit ClusterMetrics(prometheus::Registry& registry);
  ~ClusterMetrics();
  void Set(const ClusterFigures& figures);  // call on one thread

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
