// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/peer_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr int64_t kFirstPause = 50'000'000, kLongestPause = 1'000'000'000;  // between failed connections

std::string NameOf(const HostPort& peer) {
  return absl::StrCat(peer.host, " ", peer.port);
}

}  // namespace

PeerState& PeerTable::Of(const HostPort& address) {
  std::unique_ptr<PeerState>& peer = peers_[NameOf(address)];
  if (peer == nullptr) peer = std::make_unique<PeerState>(PeerState{.address = address});
  return *peer;
}

void PeerTable::Keep(const std::vector<HostPort>& kept, absl::FunctionRef<void(PeerState&)> remove) {
  std::set<std::string> names;
  for (const HostPort& peer : kept) names.insert(NameOf(peer));
  for (auto at = peers_.begin(); at != peers_.end();) {
    PeerState& peer = *at->second;
    if (names.contains(at->first) || !peer.waiting.empty() || !peer.running.empty()) {
      ++at;
      continue;
    }
    remove(peer);
    at = peers_.erase(at);
  }
}

void PeerTable::Wait(PeerState& peer, uint64_t request, uint64_t bytes) {
  peer.waiting.emplace(request, bytes);
  may_start_ = true;
}

// Peers take turns, one request each. The peer whose request does not fit globally has the next turn.
std::optional<uint64_t> PeerTable::Next() {
  for (size_t passed = 0; passed < peers_.size(); ++passed) {
    auto next = peers_.upper_bound(last_turn_);
    if (next == peers_.end()) next = peers_.begin();
    const PeerState& peer = *next->second;
    if (!peer.waiting.empty()) {
      const auto& [request, bytes] = *peer.waiting.begin();
      const auto fits = [bytes = bytes](uint64_t used, uint64_t bound) { return used == 0 || used + bytes <= bound; };
      if (!fits(bytes_in_flight_, options_.bytes_in_flight)) return std::nullopt;
      if (fits(peer.bytes_in_flight, options_.bytes_in_flight_of_a_peer)) {
        last_turn_ = next->first;
        return request;
      }
    }
    last_turn_ = next->first;
  }
  return std::nullopt;
}

void PeerTable::Start(PeerState& peer, uint64_t request) {
  const auto waiting = peer.waiting.find(request);
  peer.bytes_in_flight += waiting->second;
  bytes_in_flight_ += waiting->second;
  peer.waiting.erase(waiting);
  peer.running.insert(request);
}

void PeerTable::End(PeerState& peer, uint64_t request, uint64_t bytes) {
  peer.waiting.erase(request);
  if (peer.running.erase(request) == 0) return;
  peer.bytes_in_flight -= bytes;
  bytes_in_flight_ -= bytes;
  may_start_ = true;
}

// Back-off with jitter: at least half of the pause.
void PeerTable::Lost(PeerState& peer, int64_t now) {
  const int64_t pause = std::min(kLongestPause, kFirstPause << std::min(peer.failures_in_a_row, 10));
  ++peer.failures;
  if (!peer.heard) {
    ++peer.failures_in_a_row;
    peer.not_before = now + pause / 2 + static_cast<int64_t>(jitter_() % (pause / 2));
  }
  peer.bytes_sent += peer.link->bytes_sent;
  peer.bytes_received += peer.link->bytes_received;
  peer.link = nullptr;
  peer.heard = false;
}

bool PeerTable::AnySlow() const {
  return std::ranges::any_of(peers_, [](const auto& each) { return each.second->slow; });
}

void PeerTable::AddTo(TransportStats& stats) const {
  for (const auto& [name, peer] : peers_) {
    PeerStats& each = stats.peers.emplace_back();
    each.peer = absl::StrCat(peer->address.host, ":", peer->address.port);
    each.connected = peer->heard;
    each.lanes = peer->lanes;
    each.path = peer->path;
    each.bytes_sent = peer->bytes_sent + (peer->link != nullptr ? peer->link->bytes_sent : 0);
    each.bytes_received = peer->bytes_received + (peer->link != nullptr ? peer->link->bytes_received : 0);
    each.bytes_in_flight = peer->bytes_in_flight;
    each.waiting = peer->waiting.size();
    each.failures = peer->failures;
  }
}

}  // namespace ashlar::daemon
