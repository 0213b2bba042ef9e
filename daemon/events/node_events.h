// SPDX-License-Identifier: Apache-2.0
// NodeEvents: the events of one daemon, and who is told of them.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"
#include "daemon/events/zmq_publisher.h"

namespace ashlar::v1 {
class Events;
}

namespace ashlar::daemon {

class NodeEvents {
 public:
  // What the cache is made with: the hub is told of everything, and `also` after it (may be empty).
  storage::TellResidence Telling(storage::TellResidence also);
  // Publishes over ZeroMQ where the configuration asks for it.
  absl::Status Publish(const v1::Events& config, RefusedConnections& refused);

  EventHub& hub() { return hub_; }
  BlockTexts& texts() { return texts_; }

 private:
  EventHub hub_;
  BlockTexts texts_;
  std::unique_ptr<ZmqPublisher> publisher_;  // null: none is asked for
};

}  // namespace ashlar::daemon
