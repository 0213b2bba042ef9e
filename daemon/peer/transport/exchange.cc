// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/exchange.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr int64_t kFirstPause = 50'000'000, kLongestPause = 1'000'000'000;  // between failed connections
constexpr int64_t kWatchEvery = 250'000'000;

}  // namespace

Exchange::Exchange(const TransportOptions& options, TransportSurroundings surroundings,
                   std::function<void(std::function<void()>)> later)
    : options_(options),
      surroundings_(std::move(surroundings)),
      later_(std::move(later)),
      jitter_(static_cast<std::minstd_rand::result_type>(surroundings_.random())) {}

absl::Status Exchange::Open() {
  auto ucx = surroundings_.open(options_, Events());
  if (!ucx.ok()) return ucx.status();
  ucx_ = *std::move(ucx);
  return absl::OkStatus();
}

Exchange::~Exchange() {
  ending_ = true;
  std::vector<uint64_t> numbers;
  for (const auto& [number, transfer] : transfers_) numbers.push_back(number);
  for (const uint64_t number : numbers) End(number, absl::CancelledError("the transport is closing"));
  ucx_.reset();  // closes all connections, which completes the last sends
  allowed_.clear();
}

void Exchange::Log(const char* event, const std::string& peer, const std::string& detail) const {
  if (options_.log) options_.log(event, peer, detail);
}

Exchange::Connection* Exchange::Of(const Link& link) {
  const auto found = connections_.find(link.id);
  return found == connections_.end() ? nullptr : &found->second;
}

std::string Exchange::NameOf(const HostPort& peer) {
  return absl::StrCat(peer.host, " ", peer.port);
}

void Exchange::Begin(Request request) {
  auto transfer = std::make_unique<Transfer>();
  const uint64_t number = request.number;
  const std::string name = NameOf(request.peer);
  std::unique_ptr<Peer>& peer = peers_[name];
  if (peer == nullptr) peer = std::make_unique<Peer>(Peer{.address = request.peer});
  transfer->role = Role::kFetching;
  transfer->ticket = {number, DrawSecret()};
  transfer->peer = peer.get();
  transfer->grant = request.grant;
  transfer->offset = request.offset;
  transfer->targets = SpanList<std::byte>(std::move(request.targets));
  transfer->length = transfer->targets.bytes();
  transfer->came = std::move(request.came);
  if (request.memory != nullptr) transfer->places = RemotePlaces(std::move(request.memory));
  transfer->deadline = request.deadline;
  transfer->done = std::move(request.done);
  const bool overflows = transfer->offset > INT64_MAX || transfer->length > INT64_MAX - transfer->offset;
  deadlines_.emplace(transfer->deadline, number);
  peer->waiting.insert(number);
  const bool empty = transfer->length == 0;
  transfers_[number] = std::move(transfer);
  if (empty || overflows) {
    End(number, absl::InvalidArgumentError(empty ? "length: 0; expected at least 1" : "offset + length overflows"));
  }
  may_start_ = true;
}

void Exchange::Cancel(uint64_t request) {
  const auto found = transfers_.find(request);
  if (found == transfers_.end()) return;
  if (found->second->role == Role::kFetching) End(request, absl::CancelledError("cancelled"));
}

void Exchange::Allow(const Grant& grant, uint64_t bytes, std::shared_ptr<GrantedBytes> granted) {
  auto allowed = std::make_shared<Allowed>(Allowed{grant, bytes, std::move(granted), {}, {}});
  MutexLock lock(allowed_mutex_);
  allowed_[grant.number] = std::move(allowed);
}

void Exchange::Revoke(uint64_t number, std::function<void()> quiet) {
  const std::shared_ptr<Allowed> allowed = FindGrant(number);
  if (allowed == nullptr) {
    if (quiet) quiet();
    return;
  }
  {
    MutexLock lock(allowed_mutex_);
    allowed_.erase(number);  // the last transfer under it releases it
  }
  allowed->quiet = std::move(quiet);
  const std::set<uint64_t> under_way = allowed->transfers;
  for (const uint64_t each : under_way) End(each, absl::FailedPreconditionError("the grant was revoked"));
}

// The transfer moves no more bytes, except for sends that UCX has begun; it is finished with the last of them.
void Exchange::End(uint64_t number, const absl::Status& status) {
  Transfer& transfer = *transfers_.at(number);
  if (transfer.ended) return;
  transfer.ended = true;
  transfer.ended_at = Now();
  transfer.outcome = status;
  if (transfer.role == Role::kLending && transfer.lent) ++recalled_;
  deadlines_.erase({transfer.deadline, number});
  Connection* const connection = transfer.link == nullptr ? nullptr : Of(*transfer.link);
  if (!status.ok() && connection != nullptr && !connection->lost && !ending_) {
    if (transfer.peer != nullptr) {
      ucx_->SendText(*transfer.link, {.kind = MessageKind::kCancel, .from = transfer.ticket}, "");
    } else {
      Refuse(*connection, transfer.theirs, status);
    }
  }
  if (transfer.sends == 0) Finish(number);
}

void Exchange::Finish(uint64_t number) {
  const auto found = transfers_.find(number);
  const std::unique_ptr<Transfer> transfer = std::move(found->second);
  transfers_.erase(found);
  if (transfer->link != nullptr) {
    if (Connection* const connection = Of(*transfer->link)) {
      if (transfer->role == Role::kFetching && transfer->lent && !connection->lost && !ending_) {
        ucx_->SendText(*transfer->link, {.kind = MessageKind::kReturned, .to = transfer->theirs}, "");
      }
      connection->transfers.erase(number);
      if (transfer->allowed != nullptr) connection->asked.erase(transfer->theirs.number);
      std::erase(connection->sending, number);
    }
  }
  const bool well = transfer->outcome.ok();
  if (transfer->peer != nullptr) {
    Peer& peer = *transfer->peer;
    peer.waiting.erase(number);
    if (peer.running.erase(number) > 0) {
      peer.bytes_in_flight -= transfer->length;
      bytes_in_flight_ -= transfer->length;
      may_start_ = true;
    }
    ++(well ? counts_.fetched : counts_.failed);
    transfer->done(transfer->outcome);
    return;
  }
  if (well) ++counts_.served;
  transfer->allowed->transfers.erase(number);
}

void Exchange::StartWaiting() {
  if (!may_start_) return;
  may_start_ = false;
  // Peers take turns, one request each, until no next request fits. The peer whose request does not fit globally has
  // the next turn.
  for (size_t passed = 0; passed < peers_.size();) {
    auto next = peers_.upper_bound(last_turn_);
    if (next == peers_.end()) next = peers_.begin();
    Peer& peer = *next->second;
    ++passed;
    if (!peer.waiting.empty()) {
      const uint64_t number = *peer.waiting.begin();
      Transfer& transfer = *transfers_.at(number);
      const auto fits = [&](uint64_t used, uint64_t bound) { return used == 0 || used + transfer.length <= bound; };
      if (!fits(bytes_in_flight_, options_.bytes_in_flight)) return;
      if (fits(peer.bytes_in_flight, options_.bytes_in_flight_of_a_peer)) {
        StartRequest(number, transfer);
        passed = 0;
      }
    }
    last_turn_ = next->first;
  }
}

void Exchange::StartRequest(uint64_t number, Transfer& transfer) {
  Peer& peer = *transfer.peer;
  absl::Status why;
  if (peer.link == nullptr && !ConnectTo(peer, why)) {
    End(number, why);
    return;
  }
  peer.waiting.erase(number);
  peer.running.insert(number);
  peer.bytes_in_flight += transfer.length;
  bytes_in_flight_ += transfer.length;
  transfer.link = peer.link;
  Connection& connection = connections_.at(peer.link->id);
  const int64_t now = Now();
  if (connection.transfers.empty()) connection.heard = now;  // nothing was expected before
  connection.transfers.insert(number);
  if (!Borrows(connection, transfer)) transfer.places = {};
  if (const absl::Status may = MayMove(transfer); !may.ok()) {
    End(number, may);
    return;
  }
  ucx_->SendText(*peer.link,
                 {.kind = transfer.places.empty() ? MessageKind::kFetch : MessageKind::kBorrow,
                  .to = transfer.grant,
                  .from = transfer.ticket,
                  .offset = transfer.offset,
                  .length = transfer.length,
                  .patience = static_cast<uint64_t>(std::max<int64_t>(transfer.deadline - now, 1))},
                 "");
}

bool Exchange::ConnectTo(Peer& peer, absl::Status& why) {
  const int64_t now = Now();
  if (now < peer.not_before) {
    why = absl::UnavailableError(absl::StrCat("not connected to ", peer.address.host, " port ", peer.address.port,
                                              "; retry in ", (peer.not_before - now) / 1'000'000, " ms"));
    return false;
  }
  auto link = ucx_->Connect(peer.address);
  if (!link.ok()) {
    why = link.status();
    return false;
  }
  peer.link = *link;
  peer.heard = false;
  connections_[peer.link->id] = {.link = peer.link, .peer = &peer, .heard = now, .moved = now};
  return true;
}

void Exchange::Expire(int64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    End(deadlines_.begin()->second, absl::DeadlineExceededError("deadline"));
  }
}

// Ends connections in use that are silent.
void Exchange::Watch(int64_t now) {
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
    } else if (KeepsLoan(connection, now)) {
      Drop(connection, "the peer does not return loaned memory");
    } else if (expects && silent > options_.silence / 3 && now - connection.pinged > options_.silence / 3) {
      connection.pinged = now;
      ucx_->SendText(link, {.kind = MessageKind::kPing}, "");
    }
  }
}

bool Exchange::Progress() {
  bool some = ucx_->Progress();
  for (Link* const link : std::exchange(dropped_, {})) ucx_->Close(*link);
  const int64_t now = Now();
  Expire(now);
  Watch(now);
  StartWaiting();
  for (auto& [id, connection] : connections_) some |= Pump(connection);
  return some || may_start_;
}

int64_t Exchange::due() const {
  const bool watches = std::any_of(connections_.begin(), connections_.end(), [](const auto& each) {
    return each.second.link->sends > 0 || (each.second.peer != nullptr && !each.second.transfers.empty());
  });
  const int64_t deadline = deadlines_.empty() ? INT64_MAX : deadlines_.begin()->first;
  return watches || recalled_ > 0 ? std::min(deadline, watched_ + kWatchEvery) : deadline;
}

TransportStats Exchange::Stats() const {
  TransportStats stats = counts_;
  stats.rdma_fallback = SlowFabric();
  for (const auto& [id, connection] : connections_) {
    stats.bytes_sent += connection.link->bytes_sent;
    stats.bytes_received += connection.link->bytes_received;
  }
  stats.transfers = transfers_.size();
  stats.loans = static_cast<uint64_t>(std::ranges::count_if(
      transfers_, [](const auto& each) { return each.second->role == Role::kLending && each.second->lent; }));
  stats.registered_bytes = areas_.bytes();
  {
    MutexLock lock(allowed_mutex_);
    stats.grants = allowed_.size();
  }
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
  for (const auto& [id, connection] : connections_) {
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
  return stats;
}

// Called when a send, or an RDMA read, is complete.
void Exchange::Moved(uint64_t link, uint64_t number, uint64_t bytes, const absl::Status& status) {
  if (const auto found = connections_.find(link); found != connections_.end()) found->second.bytes_queued -= bytes;
  const auto found = transfers_.find(number);
  Transfer& transfer = *found->second;  // exists while a send reads its sources
  --transfer.sends;
  if (status.ok() && transfer.came != nullptr) transfer.came->fetch_add(bytes);
  if (transfer.ended) {
    if (transfer.sends == 0) Finish(number);
  } else if (!status.ok()) {
    End(number, status);
  } else if (transfer.sends == 0 && transfer.sent == transfer.length) {
    End(number, absl::OkStatus());  // the last byte was handed to the network or received
  }
}

// Back-off with jitter: at least half of the pause.
void Exchange::Lost(Link& link, const absl::Status& why) {
  Connection* const connection = Of(link);
  if (connection == nullptr || connection->lost) return;
  connection->lost = true;
  Log("lost", link.peer, std::string(why.message()));
  if (Peer* const peer = connection->peer; peer != nullptr && peer->link == &link) {
    ++peer->failures;
    const int64_t pause = std::min(kLongestPause, kFirstPause << std::min(peer->failures_in_a_row, 10));
    if (!peer->heard) {
      ++peer->failures_in_a_row;
      peer->not_before = Now() + pause / 2 + static_cast<int64_t>(jitter_() % (pause / 2));
    }
    peer->link = nullptr;
    peer->heard = false;
    peer->bytes_sent += link.bytes_sent;
    peer->bytes_received += link.bytes_received;
  }
  const std::set<uint64_t> under_way = connection->transfers;
  for (const uint64_t number : under_way) {
    if (transfers_.contains(number)) End(number, absl::UnavailableError(why.message()));
  }
}

}  // namespace ashlar::daemon
