// SPDX-License-Identifier: Apache-2.0
// Handles events of connections.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/exchange.h"

namespace ashlar::daemon {
namespace {

constexpr int kMaxMalformed = 16;  // per connection; then it ends

}  // namespace

LinkEvents Exchange::Events() {
  return {.admit =
              [this](const std::string& peer) {
                if (accepted_ < options_.accepted_connections) return true;
                Log("refused", peer, "too many connections");
                return false;
              },
          .accepted =
              [this](Link& link) {
                ++accepted_;
                const int64_t now = Now();
                connections_[link.id] = {.link = &link, .heard = now, .moved = now};
              },
          .received = [this](Link* link, std::span<const std::byte> header,
                             std::span<const std::byte> payload) { OnMessage(link, header, payload); },
          .lost = [this](Link& link, const absl::Status& why) { Lost(link, why); },
          .silent = [this](size_t count) { Log("suspect", "", absl::StrCat(count, " connections sent nothing")); },
          .closed = [this](Link& link) { Closed(link); }};
}

void Exchange::OnMessage(Link* link, std::span<const std::byte> header, std::span<const std::byte> payload) {
  Connection* const connection = link == nullptr ? nullptr : Of(*link);
  if (connection != nullptr && connection->lost) return;
  const absl::StatusOr<Message> message = ParseMessage(header, payload.size());
  if (connection == nullptr || !message.ok()) {
    ++counts_.malformed;
    if (connection != nullptr) Suspect(*connection, absl::StrCat("malformed message: ", message.status().message()));
    // A peer that sends only such messages costs no more than these.
    if (connection != nullptr && ++connection->malformed > kMaxMalformed) {
      Drop(*connection, "malformed messages");
    }
    return;
  }
  Heard(*connection);
  Handle(*connection, *message, payload);
}

void Exchange::Heard(Connection& connection) {
  connection.heard = Now();
  if (!connection.lanes.empty()) return;
  connection.lanes = ucx_->Lanes(*connection.link);
  if (connection.lanes.empty()) connection.lanes = "unknown";
  connection.reads = ucx_->ReadsOver(connection.lanes);
  const std::string path = connection.reads ? "rma" : "am";
  Log("connected", connection.link->peer, absl::StrCat(connection.lanes, ", path ", path));
  connection.slow = options_.expect_rdma && !absl::StrContains(connection.lanes, "rc_") &&
                    !absl::StrContains(connection.lanes, "dc_");
  if (connection.peer == nullptr) return;
  connection.peer->heard = true;
  connection.peer->slow = connection.slow;
  connection.peer->lanes = connection.lanes;
  connection.peer->path = path;
  connection.peer->failures_in_a_row = 0;
}

// Logs, once per connection, the sender of messages that no peer sends: counts alone would not identify it.
void Exchange::Suspect(Connection& connection, absl::string_view why) {
  if (std::exchange(connection.suspected, true)) return;
  Log("suspect", connection.link->peer, std::string(why));
}

// Ends a connection. UCX may be processing one of its messages, so Progress closes it later.
void Exchange::Drop(Connection& connection, absl::string_view why) {
  Link& link = *connection.link;
  Lost(link, absl::UnavailableError(absl::StrCat("connection with ", link.peer, ": ", why)));
  dropped_.push_back(&link);
}

void Exchange::Closed(Link& link) {
  std::erase(dropped_, &link);  // a dropped one may fail before it is closed
  const auto found = connections_.find(link.id);
  if (found == connections_.end()) return;
  GiveBackAll(found->second);  // RDMA does not read over a closed link
  counts_.bytes_sent += link.bytes_sent;
  counts_.bytes_received += link.bytes_received;
  if (link.accepted) --accepted_;
  connections_.erase(link.id);
}

void Exchange::KeepPeers(const std::vector<HostPort>& peers) {
  std::set<std::string> kept;
  for (const HostPort& peer : peers) kept.insert(NameOf(peer));
  for (auto at = peers_.begin(); at != peers_.end();) {
    Peer& peer = *at->second;
    if (kept.contains(at->first) || !peer.waiting.empty() || !peer.running.empty()) {
      ++at;
      continue;
    }
    if (peer.link != nullptr) Drop(*Of(*peer.link), "the node left the cluster");
    for (auto& [id, connection] : connections_) {
      if (connection.peer == &peer) connection.peer = nullptr;
    }
    at = peers_.erase(at);
  }
}

// Determined by the current transport, or that of the last connection to a peer; a recovered fabric clears it.
bool Exchange::SlowFabric() const {
  if (!options_.expect_rdma) return false;
  const auto accepted = [](const auto& each) {
    const Connection& connection = each.second;
    return connection.link->accepted && !connection.lost && connection.slow;
  };
  return !ucx_->has_rdma() || std::ranges::any_of(connections_, accepted) ||
         std::ranges::any_of(peers_, [](const auto& each) { return each.second->slow; });
}

}  // namespace ashlar::daemon
