// SPDX-License-Identifier: Apache-2.0
// ClusterMetrics: what a node does with others, for Prometheus. All families are there on a node that is alone, too, at
// 0.
#pragma once

#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/observe/peer_metrics.h"

namespace ashlar::daemon {

// Erasures that some present node has not acknowledged.
struct PendingErasures {
  uint64_t count = 0;
  double oldest_seconds = 0;  // for how long this node has seen one wait
};

// Why a node is not ready whose `slow_fabric` is true.
inline constexpr const char* kSlowFabric = "cluster.expect_transport is rdma, and bytes go another way";

// At one moment. Counts are since the daemon started.
struct ClusterFigures {
  uint64_t members = 0, peers_connected = 0;
  std::vector<std::pair<std::string, uint64_t>> refusals;  // by reason
  bool directory_connected = false;
  uint64_t directory_entries = 0, directory_bytes = 0, directory_queued = 0;
  uint64_t directory_dropped = 0, directory_resyncs = 0;
  PendingErasures erasures_here, erasures_elsewhere;                  // that wait for this node, and for others
  uint64_t opened = 0, missed = 0, failed = 0, joined = 0, late = 0;  // objects asked of peers; late: look-ups
  uint64_t fetched_bytes = 0, failed_pieces = 0, moved = 0;
  uint64_t hedges_won = 0, hedges_lost = 0;  // pieces that a second node was asked for
  struct Offered {
    std::string why, outcome;
    uint64_t objects = 0;
  };
  std::vector<Offered> offers;  // made, by why; `why` received: by other nodes
  bool handing_over = false;
  uint64_t offered_bytes = 0, taken_bytes = 0;  // of what others took, and this node
  uint64_t peer_readers = 0, peer_leases = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;
  uint64_t transport_grants = 0, transport_transfers = 0, transport_loans = 0;
  uint64_t transport_refused = 0, transport_malformed = 0;
  uint64_t peers_by_am = 0, peers_by_rma = 0;     // that this node has a connection to, by how bytes come over it
  uint64_t read_bytes = 0, registered_bytes = 0;  // by network cards; read at peers, and in arenas that peers' may read
  bool slow_fabric = false;
  int64_t certificate_expiry = 0;       // Unix time; 0: peers are believed without one
  int64_t certificate_seconds = 0;      // for how long it is valid in all
  int64_t etcd_certificate_expiry = 0;  // likewise; 0: etcd is shown none
  int64_t etcd_certificate_seconds = 0;
  std::vector<PeerFigures> peers;  // the other members, in the order of their names; at most as many as are
                                   // connected to (PeerChannels::kMostPeers)
};

class ClusterMetrics {
 public:
  explicit ClusterMetrics(prometheus::Registry& registry);
  ~ClusterMetrics();
  void Set(const ClusterFigures& figures);  // one thread

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
