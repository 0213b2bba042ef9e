// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/connections.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr int kMaxMalformed = 16;  // per connection; then it ends
constexpr int64_t kWatchEvery = 250'000'000;

}  // namespace

absl::Status Connections::Open() {
  auto ucx = surroundings_.open(options_, Events());
  if (!ucx.ok()) return ucx.status();
  ucx_ = *std::move(ucx);
  return absl::OkStatus();
}

void Connections::Log(const char* event, const std::string& peer, const std::string& detail) const {
  if (options_.log) options_.log(event, peer, detail);
}

PeerConnection* Connections::Find(uint64_t link) {
  const auto found = connections_.find(link);
  return found == connections_.end() ? nullptr : &found->second;
}

absl::StatusOr<PeerConnection*> Connections::Connect(PeerState& peer) {
  const int64_t now = surroundings_.now();
  if (now < peer.not_before) {
    return absl::UnavailableError(absl::StrCat("not connected to ", peer.address.host, " port ", peer.address.port,
                                               "; retry in ", (peer.not_before - now) / 1'000'000, " ms"));
  }
  const absl::StatusOr<Link*> link = ucx_->Connect(peer.address);
  if (!link.ok()) return link.status();
  peer.link = *link;
  peer.heard = false;
  PeerConnection& connection = connections_[peer.link->id];
  connection = {.link = peer.link, .peer = &peer, .heard = now, .moved = now};
  return &connection;
}

void Connections::Remove(PeerState& peer) {
  if (peer.link != nullptr) Drop(*Of(*peer.link), "the node left the cluster");
  for (auto& [id, connection] : connections_) {
    if (connection.peer == &peer) connection.peer = nullptr;
  }
}

LinkEvents Connections::Events() {
  return {
      .admit =
          [this](const std::string& peer) {
            if (accepted_ < options_.accepted_connections) return true;
            Log("transport connection: refused", peer, "too many connections");
            return false;
          },
      .accepted =
          [this](Link& link) {
            ++accepted_;
            const int64_t now = surroundings_.now();
            connections_[link.id] = {.link = &link, .heard = now, .moved = now};
          },
      .received = [this](Link* link, std::span<const std::byte> header,
                         std::span<const std::byte> payload) { OnMessage(link, header, payload); },
      .lost = [this](Link& link, const absl::Status& why) { Lost(link, why); },
      .silent = [this](size_t count) { Log(kProtocolViolation, "", absl::StrCat(count, " connections sent nothing")); },
      .closed = [this](Link& link) { Closed(link); }};
}

void Connections::OnMessage(Link* link, std::span<const std::byte> header, std::span<const std::byte> payload) {
  PeerConnection* const connection = link == nullptr ? nullptr : Of(*link);
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
  events_.Received(*connection, *message, payload);
}

void Connections::Heard(PeerConnection& connection) {
  connection.heard = surroundings_.now();
  if (!connection.lanes.empty()) return;
  connection.lanes = ucx_->Lanes(*connection.link);
  if (connection.lanes.empty()) connection.lanes = "unknown";
  connection.reads = ucx_->ReadsOver(connection.lanes);
  const std::string path = connection.reads ? "rma" : "am";
  Log("transport connection: opened", connection.link->peer, absl::StrCat(connection.lanes, ", path ", path));
  connection.slow = options_.expect_rdma && !absl::StrContains(connection.lanes, "rc_") &&
                    !absl::StrContains(connection.lanes, "dc_");
  if (connection.peer == nullptr) return;
  connection.peer->heard = true;
  connection.peer->slow = connection.slow;
  connection.peer->lanes = connection.lanes;
  connection.peer->path = path;
  connection.peer->failures_in_a_row = 0;
}

void Connections::Suspect(PeerConnection& connection, absl::string_view why) {
  if (std::exchange(connection.suspected, true)) return;
  Log(kProtocolViolation, connection.link->peer, std::string(why));
}

void Connections::Drop(PeerConnection& connection, absl::string_view why) {
  Link& link = *connection.link;
  Lost(link, absl::UnavailableError(absl::StrCat("connection with ", link.peer, ": ", why)));
  dropped_.push_back(&link);
}

void Connections::CloseDropped() {
  for (Link* const link : std::exchange(dropped_, {})) ucx_->Close(*link);
}

void Connections::Lost(Link& link, const absl::Status& why) {
  PeerConnection* const connection = Of(link);
  if (connection == nullptr || connection->lost) return;
  connection->lost = true;
  Log(kConnectionLost, link.peer, std::string(why.message()));
  if (connection->peer != nullptr && connection->peer->link == &link) {
    peers_.Lost(*connection->peer, surroundings_.now());
  }
  events_.Lost(*connection, why);
}

void Connections::Closed(Link& link) {
  std::erase(dropped_, &link);  // a dropped one may fail before it is closed
  const auto found = connections_.find(link.id);
  if (found == connections_.end()) return;
  events_.Closed(found->second);
  counts_.bytes_sent += link.bytes_sent;
  counts_.bytes_received += link.bytes_received;
  if (link.accepted) --accepted_;
  connections_.erase(link.id);
}

void Connections::Watch(int64_t now) {
  if (now - watched_ < kWatchEvery) return;
  watched_ = now;
  for (auto& [id, connection] : connections_) {
    Link& link = *connection.link;
    if (connection.lost) continue;
    if (link.sends == 0 || link.completed != connection.completed) {
      connection.completed = link.completed;
      connection.moved = now;
    }
    const bool stuck = link.sends > 0 && now - connection.moved > options_.silence;
    const int64_t silent = now - connection.heard;
    const bool expects = connection.peer != nullptr && !connection.transfers.empty();
    if (stuck || (expects && silent > options_.silence)) {
      Drop(connection, absl::StrCat("no message for ", options_.silence / 1'000'000, " ms"));
    } else if (events_.KeepsLoan(connection, now)) {
      Drop(connection, "the peer does not return loaned memory");
    } else if (expects && silent > options_.silence / 3 && now - connection.pinged > options_.silence / 3) {
      connection.pinged = now;
      ucx_->SendText(link, {.kind = MessageKind::kPing}, "");
    }
  }
}

int64_t Connections::NextWatch() const {
  return watched_ + kWatchEvery;
}

bool Connections::AnyInUse() const {
  return std::ranges::any_of(connections_, [](const auto& each) {
    return each.second.link->sends > 0 || (each.second.peer != nullptr && !each.second.transfers.empty());
  });
}

// Determined by the current transport, or that of the last connection to a peer; a recovered fabric clears it.
bool Connections::SlowFabric() const {
  if (!options_.expect_rdma) return false;
  const auto accepted = [](const auto& each) {
    const PeerConnection& connection = each.second;
    return connection.link->accepted && !connection.lost && connection.slow;
  };
  return !ucx_->has_rdma() || std::ranges::any_of(connections_, accepted) || peers_.AnySlow();
}

void Connections::AddTo(TransportStats& stats) const {
  stats.rdma_fallback = SlowFabric();
  for (const auto& [id, connection] : connections_) {
    stats.bytes_sent += connection.link->bytes_sent;
    stats.bytes_received += connection.link->bytes_received;
    if (connection.peer != nullptr || connection.lost) continue;
    stats.peers.push_back({.peer = connection.link->peer,
                           .accepted = true,
                           .connected = true,
                           .lanes = connection.lanes,
                           .path = connection.reads ? "rma" : "am",
                           .bytes_sent = connection.link->bytes_sent,
                           .bytes_received = connection.link->bytes_received,
                           .bytes_in_flight = connection.bytes_queued});
  }
}

}  // namespace ashlar::daemon
