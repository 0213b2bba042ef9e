// SPDX-License-Identifier: Apache-2.0
// ConnectedPeers: the nodes that are connected to this one, each as one incarnation of its daemon.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "daemon/peer/control/peer_messages.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// A reader is a node with the incarnation of its daemon: a reconnected daemon is the same reader; a restarted one is
// another. Any thread.
class ConnectedPeers {
 public:
  // `gone` is called when a reader has disconnected, or has been replaced by another of its node. The same reader is
  // not connected again before the call has returned. It must not call this object.
  explicit ConnectedPeers(std::function<void(const std::string& reader)> gone) : gone_(std::move(gone)) {}

  static std::string ReaderOf(const PeerHello& peer);

  void Connected(const PeerHello& peer);
  void Disconnected(const std::string& node);
  // Returns whether the peer is still connected as the same incarnation.
  bool Has(const PeerHello& peer);

 private:
  const std::function<void(const std::string& reader)> gone_;
  Mutex mutex_;
  std::map<std::string, std::string> readers_ ABSL_GUARDED_BY(mutex_);  // keyed by node
};

}  // namespace ashlar::daemon
