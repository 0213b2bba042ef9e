// SPDX-License-Identifier: Apache-2.0
// PeerProbes: asks nodes that did not answer, until they answer again.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/runtime/event_loop.h"

namespace ashlar::daemon {

// One call is under way to each node that did not answer. A node that stood still answers the call that waits there as
// soon as it goes on, so lookups ask it again within a round trip; a node whose connection was lost is asked kPause
// after the connection is back. The metadata thread only.
class PeerProbes {
 public:
  // All must outlive it.
  PeerProbes(EventLoop& loop, const storage::Clock& clock, const Directory& directory, PeerAsker& asker,
             PeerRates& rates)
      : loop_(loop), clock_(clock), directory_(directory), asker_(asker), rates_(rates) {}

  // Call it many times a second.
  void Tick();

 private:
  static constexpr storage::Nanos kPause = 250'000'000;  // between two probes of a node
  static constexpr storage::Nanos kEvery = 50'000'000;   // between two looks for nodes that fail

  struct Probe {
    bool under_way = false;
    storage::Nanos not_before = 0;
  };
  void Ended(const std::string& node, const absl::Status& status);

  EventLoop& loop_;
  const storage::Clock& clock_;
  const Directory& directory_;
  PeerAsker& asker_;
  PeerRates& rates_;
  std::map<std::string, Probe> probes_;  // by node
  storage::Nanos looked_at_ = 0;
};

}  // namespace ashlar::daemon
