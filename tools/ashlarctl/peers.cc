// SPDX-License-Identifier: Apache-2.0
// ashlarctl peers: the other nodes of a cluster, as one node sees them.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

json JsonOf(const v1::PeerInfo& peer) {
  return {{"node", peer.node()},
          {"version", peer.version()},
          {"control_address", peer.control_address()},
          {"transport_address", peer.transport_address()},
          {"connected", peer.connected()},
          {"protocol", peer.protocol()},
          {"lanes", peer.lanes()},
          {"bytes_per_second", peer.bytes_per_second()},
          {"rtt_seconds", peer.rtt_seconds()},
          {"received_bytes", peer.received_bytes()},
          {"sent_bytes", peer.sent_bytes()},
          {"failed_calls", peer.failed_calls()},
          {"lost_connections", peer.lost_connections()},
          {"stalls", peer.stalls()},
          {"held_there", peer.held_there()},
          {"held_there_bytes", peer.held_there_bytes()},
          {"held_here", peer.held_here()},
          {"held_here_bytes", peer.held_here_bytes()}};
}

std::string TextOf(const v1::PeerInfo& peer) {
  std::string text = absl::StrCat(peer.node(), ": ", peer.connected() ? "connected" : "NOT connected", ", ashlard ",
                                  peer.version(), ", ", peer.transport_address(), "\n  bytes    ");
  absl::StrAppend(&text,
                  peer.protocol().empty() ? "no transfer yet" : absl::StrCat(peer.protocol(), " over ", peer.lanes()));
  if (peer.bytes_per_second() > 0) {
    absl::StrAppend(&text, ", ", Bytes(static_cast<uint64_t>(peer.bytes_per_second())), "/s");
  }
  if (peer.rtt_seconds() > 0) absl::StrAppendFormat(&text, "; round trip %.2f ms", peer.rtt_seconds() * 1e3);
  absl::StrAppend(&text, "\n  total    ", Bytes(peer.received_bytes()), " received from it, ", Bytes(peer.sent_bytes()),
                  " sent to it; ", peer.failed_calls(), " calls failed, ", peer.lost_connections(),
                  " connections lost, ", peer.stalls(), " copies stalled\n  now      it holds ", peer.held_there(),
                  " objects (", Bytes(peer.held_there_bytes()), ") for this node, and this node ", peer.held_here(),
                  " (", Bytes(peer.held_here_bytes()), ") for it\n");
  return text;
}

}  // namespace

absl::StatusOr<Answer> Peers(const Arguments&, AdminClient& client) {
  v1::PeersReply reply;
  if (absl::Status status = client.Peers(v1::PeersRequest(), &reply); !status.ok()) return status;
  Answer answer{.json = {{"peers", json::array()}}};
  for (const v1::PeerInfo& peer : reply.peers()) {
    answer.json["peers"].push_back(JsonOf(peer));
    answer.text += TextOf(peer);
  }
  if (answer.text.empty()) answer.text = "no other nodes\n";
  return answer;
}

}  // namespace ashlar::ctl
