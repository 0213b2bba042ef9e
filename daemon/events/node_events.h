// SPDX-License-Identifier: Apache-2.0
// NodeEvents: the events of one daemon and their subscribers.
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
  // Returns the residence callback for the cache. It notifies the hub, and then `also` (may be empty).
  storage::ReportResidence Reporter(storage::ReportResidence also);
  // Starts publishing over ZeroMQ if the configuration asks for it.
  absl::Status Publish(const v1::Events& config, RefusedConnections& refused);

  EventHub& hub() { return hub_; }
  BlockTexts& texts() { return texts_; }

 private:
  EventHub hub_;
  BlockTexts texts_;
  std::unique_ptr<ZmqPublisher> publisher_;  // null if ZeroMQ is not configured
};

}  // namespace ashlar::daemon
