// SPDX-License-Identifier: Apache-2.0
// PeerProbes: probes nodes that did not answer until they answer again.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/runtime/event_loop.h"

namespace ashlar::daemon {

// One call is in flight to each node that did not answer. A node that was suspended answers that call when it resumes,
// so lookups use it again within a round trip. A node with a lost connection is probed kPause after it reconnects. The
// metadata thread only.
class PeerProbes {
 public:
  // All arguments must outlive the object.
  PeerProbes(EventLoop& loop, const storage::Clock& clock, const Directory& directory, PeerAsker& asker,
             PeerRates& rates)
      : loop_(loop), clock_(clock), directory_(directory), asker_(asker), rates_(rates) {}

  // Call it many times per second.
  void Tick();

 private:
  static constexpr storage::Nanos kPause = 250'000'000;  // between two probes of a node
  static constexpr storage::Nanos kEvery = 50'000'000;   // between two scans for failed nodes

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
  std::map<std::string, Probe> probes_;  // key is the node name
  storage::Nanos looked_at_ = 0;
};

}  // namespace ashlar::daemon
