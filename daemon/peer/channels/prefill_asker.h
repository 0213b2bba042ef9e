// SPDX-License-Identifier: Apache-2.0
// PrefillAsker: the calls that this node makes to engines on other nodes that offer prefill.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/peer/directory/directory.h"

namespace ashlar::daemon {

// Thread-safe; never blocks. Every call is answered once, on any thread: Workers and Probe within seconds, Prefill
// within its patience. If the node is not connected, the answer is UNAVAILABLE immediately.
class PrefillAsker {
 public:
  virtual ~PrefillAsker() = default;

  virtual void Workers(const Member& member, const std::string& tenant, const NamespaceId& ns,
                       PeerCalls::Done<std::vector<PeerWorker>> done) = 0;
  virtual void Prefill(const Member& member, const std::string& tenant, PeerPrefill prefill,
                       PeerCalls::Done<PeerOpened> done) = 0;
  virtual void Probe(const Member& member, const std::string& tenant, const PeerProbe& probe,
                     PeerCalls::Done<v1::NodeProbe> done) = 0;
};

}  // namespace ashlar::daemon
