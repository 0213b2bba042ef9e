// SPDX-License-Identifier: Apache-2.0
// PeerBounds: the most open files and mappings that a daemon needs for its cluster, checked at startup.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ashlar/v1/config.pb.h"
#include "daemon/peer/channels/peer_channels.h"
#include "daemon/peer/control/peer_listener.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

struct PeerBounds {
  // Measured by tests. A transport connection has two files at each end. A connection for calls has one at the end that
  // made it and two at the other, where PeerListener keeps one to detect its end.
  static constexpr uint64_t kFilesOfTransport = 2, kFilesOfCalls = 1, kFilesOfAcceptedCalls = 2;
  // A daemon in a cluster has 19 files and 92 mappings more than a single one: etcd, gRPC's pollers, UCX's modules and
  // worker, 13 threads. The rest is reserved for connections that end while others begin.
  static constexpr uint64_t kFiles = 64, kMappings = 256;
  // Connection buffers come from the allocator's heaps. Measured: one mapping per 12 connections, and with UCX 1.18 one
  // per transport connection.
  static constexpr uint64_t kMappingsOfTransport = 1, kConnectionsOfAMapping = 4;

  uint64_t files = 0, mappings = 0;

  // Returns zero without a cluster. The configured peers bound the connections that this node makes; the accept limits
  // bound those of other nodes.
  static PeerBounds Of(const v1::Config& config) {
    if (!config.has_cluster()) return {};
    const auto& named = config.cluster().peers();
    const bool all = named.empty() || std::any_of(named.begin(), named.end(),
                                                  [](const v1::ClusterPeer& peer) { return peer.node() == "*"; });
    const uint64_t most = PeerChannels::kMostPeers;
    const uint64_t peers = all ? most : std::min<uint64_t>(named.size(), most);
    const uint64_t transport = peers + TransportOptions{}.accepted_connections;
    const uint64_t accepted = PeerListener::kConnections;
    return {.files = kFiles + kFilesOfTransport * transport + kFilesOfCalls * peers + kFilesOfAcceptedCalls * accepted,
            .mappings = kMappings + kMappingsOfTransport * transport + (peers + accepted) / kConnectionsOfAMapping};
  }
};

}  // namespace ashlar::daemon
