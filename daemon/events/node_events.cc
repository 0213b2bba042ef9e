// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/node_events.h"

#include <utility>

#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {

storage::ReportResidence NodeEvents::Reporter(storage::ReportResidence also) {
  return [this, also = std::move(also)](const storage::TenantPool& pool, const ObjectHeader& header,
                                        const storage::Residence& residence) {
    hub_.Resides(pool, header, residence);
    return also ? also(pool, header, residence) : TierKind::kNone;
  };
}

absl::Status NodeEvents::Publish(const v1::Events& config, RefusedConnections& refused) {
  if (config.zmq_address().empty()) return absl::OkStatus();
  if (config.segments()) texts_.KeepSegments();
  auto publisher = ZmqPublisher::Start({.address = config.zmq_address(),
                                        .replay_address = config.zmq_replay_address(),
                                        .topic = config.topic(),
                                        .kept = config.kept_batches()},
                                       hub_, texts_, refused);
  if (!publisher.ok()) return publisher.status();
  publisher_ = *std::move(publisher);
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
