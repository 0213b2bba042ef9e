// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/connected_peers.h"

namespace ashlar::daemon {

std::string ConnectedPeers::ReaderOf(const PeerHello& peer) {
  return peer.node + "/" + std::string(peer.incarnation.begin(), peer.incarnation.end());
}

void ConnectedPeers::Connected(const PeerHello& peer) {
  MutexLock lock(mutex_);
  std::string& known = readers_[peer.node];
  if (!known.empty() && known != ReaderOf(peer)) gone_(known);
  known = ReaderOf(peer);
}

void ConnectedPeers::Disconnected(const std::string& node) {
  MutexLock lock(mutex_);
  if (const auto gone = readers_.extract(node)) gone_(gone.mapped());
}

bool ConnectedPeers::Has(const PeerHello& peer) {
  MutexLock lock(mutex_);
  const auto known = readers_.find(peer.node);
  return known != readers_.end() && known->second == ReaderOf(peer);
}

}  // namespace ashlar::daemon
