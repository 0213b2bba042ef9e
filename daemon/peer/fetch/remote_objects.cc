// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/fetch/remote_objects.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/runtime/host_port.h"
#include "daemon/runtime/log.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMostReading = 16;  // pieces per holder, so that a stalled holder leaves capacity for others

// The part of the extents that is transferred: without the header and the bytes after the object's end.
Spans AfterHeader(const OpenedObject& object, uint64_t first, const std::vector<std::byte*>& targets) {
  Spans spans;
  for (size_t i = 0; i < targets.size(); ++i) {
    const uint64_t begin = (first + i) * limits::kExtentBytes;
    const uint64_t end = std::min(begin + limits::kExtentBytes, object.header.bytes);
    uint64_t skip = 0;
    if (first + i == 0) skip = std::min<uint64_t>(object.encoded.size(), end);
    if (begin + skip < end) spans.push_back({targets[i] + skip, end - begin - skip});
  }
  return spans;
}

// Writes the header, once. Afterwards engines may read it.
Spans WriteHeader(const OpenedObject& object, uint64_t first, const std::vector<std::byte*>& targets,
                  const kernels::Gpu* gpu) {
  if (first == 0) {
    const uint64_t end = std::min(limits::kExtentBytes, object.header.bytes);
    const uint64_t bytes = std::min<uint64_t>(object.encoded.size(), end);
    if (gpu != nullptr) {
      gpu->CopyToDevice(targets[0], object.encoded.data(), bytes);
    } else {
      std::memcpy(targets[0], object.encoded.data(), bytes);
    }
  }
  return AfterHeader(object, first, targets);
}

uint64_t BytesOf(const Spans& spans) {
  uint64_t bytes = 0;
  for (const auto& span : spans) bytes += span.size();
  return bytes;
}

}  // namespace

storage::RemoteCopyId RemoteObjects::Add(storage::TenantId tenant, OpenedObject object,
                                         std::vector<std::shared_ptr<const Member>> others) {
  const storage::RemoteCopyId id = ++drawn_;
  std::erase(others, object.member);
  const uint64_t bytes = object.header.bytes;
  copies_[id] = {.tenant = tenant, .object = std::move(object), .others = std::move(others), .left = bytes};
  stats_.copies = copies_.size();
  return id;
}

bool RemoteObjects::Read(storage::RemoteCopyId id, uint64_t first, std::vector<std::byte*> targets,
                         const kernels::Gpu* gpu, std::function<void(absl::Status)> done) {
  Copy& copy = copies_.at(id);
  const auto reading = reading_.find(copy.object.member->incarnation);
  if (reading != reading_.end() && reading->second >= kMostReading) return false;
  ++stats_.reading;
  Piece piece{
      .first = first, .targets = std::move(targets), .gpu = gpu, .done = std::move(done), .holder = std::nullopt};
  if (copy.moving) {
    CountAt(piece, copy.object.member->incarnation);
    copy.waiting.push_back(std::move(piece));
  } else {
    Fetch(id, copy, std::move(piece));
  }
  return true;
}

void RemoteObjects::CountAt(Piece& piece, std::optional<uint64_t> holder) {
  if (piece.holder.has_value()) {
    const auto reading = reading_.find(*piece.holder);
    if (--reading->second == 0) reading_.erase(reading);
  }
  piece.holder = holder;
  if (holder.has_value()) ++reading_[*holder];
}

void RemoteObjects::Fetch(storage::RemoteCopyId id, Copy& copy, Piece piece) {
  CountAt(piece, copy.object.member->incarnation);
  const uint64_t first = piece.first;
  const auto race =
      std::make_shared<Race>(Race{.piece = std::move(piece), .holder_generation = copy.holder_generation});
  copy.races[first] = race;
  Start(id, copy, race, 0);
}

void RemoteObjects::Start(storage::RemoteCopyId id, Copy& copy, const std::shared_ptr<Race>& race, size_t which) {
  const OpenedObject& object = which == 0 ? copy.object : *copy.second;
  const Piece& piece = race->piece;
  const uint64_t skipped = piece.first == 0 ? object.encoded.size() : 0;
  Spans spans = which == 0 ? WriteHeader(object, piece.first, piece.targets, piece.gpu)
                           : AfterHeader(object, piece.first, piece.targets);
  const uint64_t bytes = BytesOf(spans);
  const storage::Nanos expected = rates_.Estimate(object.member->node, bytes);
  const auto times = [&](double factor) { return static_cast<storage::Nanos>(factor * static_cast<double>(expected)); };
  const storage::Nanos patience =
      rates_.Patience(object.member->node, bytes, options_.patience, {options_.least_patience, options_.most_patience});
  Request& request = race->requests[which];
  request = {.from = object.member,
             .began = clock_.Now(),
             .bytes = bytes,
             .received_bytes = std::make_shared<std::atomic<uint64_t>>(0),
             .running = true};
  rates_.Begins(object.member->node, bytes, request.began);
  const bool has_second = copy.second.has_value() || copy.asking || !copy.others.empty();
  if (which == 0 && options_.hedge > 0 && has_second) {
    late_.emplace(request.began + std::max(times(options_.hedge), options_.least_hedge), id, piece.first);
  }
  auto ended = [this, id, tenant = copy.tenant, race, which](const absl::Status& status) {
    loop_.PostCompletion(tenant, [this, id, race, which, status] { Ended(id, race, which, status); });
  };
  if (stopped_) return ended(absl::CancelledError("this node is leaving the cluster"));
  const absl::StatusOr<HostPort> address = ParseHostPort(object.member->transport_address);
  if (!address.ok()) return ended(address.status());
  if (bytes == 0) return ended(absl::OkStatus());
  request.number =
      transport_.Fetch(*address, object.grant, piece.first * limits::kExtentBytes + skipped, std::move(spans), patience,
                       std::move(ended), object.memory, request.received_bytes);
}

void RemoteObjects::Ended(storage::RemoteCopyId id, const std::shared_ptr<Race>& race, size_t which,
                          const absl::Status& status) {
  Copy& copy = copies_.at(id);
  Request& request = race->requests[which];
  request.running = false;
  Count(request);
  rates_.Ends(request.from->node, request.bytes, clock_.Now());
  if (absl::IsDeadlineExceeded(status)) rates_.Abandoned(request.from->node, request.began, clock_.Now());
  if (!status.ok() && race->won < 0) race->failed = status;
  if (status.ok() && race->won < 0) race->won = static_cast<int>(which);
  if (which == 1 && !status.ok() && race->won < 0) DropSecond(copy, *request.from);
  const Request& other = race->requests[1 - which];
  if (other.running) {
    if (race->won >= 0) transport_.Cancel(other.number);
    return;
  }
  copy.races.erase(race->piece.first);
  if (race->won >= 0) return Came(copy, race);
  const bool first_error = race->holder_generation == copy.holder_generation && !copy.moving;
  copy.waiting.push_back(std::move(race->piece));
  if (first_error) return Move(id, copy, race->failed);
  if (copy.moving) return;
  GoOn(id, copy);  // another holder has taken over meanwhile
}

void RemoteObjects::Came(Copy& copy, const std::shared_ptr<Race>& race) {
  Piece& piece = race->piece;
  CountAt(piece, std::nullopt);
  const uint64_t begin = piece.first * limits::kExtentBytes;
  const uint64_t bytes = std::min(piece.targets.size() * limits::kExtentBytes, copy.object.header.bytes - begin);
  const storage::Nanos now = clock_.Now();
  for (const Request& request : race->requests) {
    if (request.from == nullptr) continue;
    rates_.Came(request.from->node, bytes, now - request.began);  // the loser has taken at least this long
    // The loser also wrote into these extents, and may have caused damage there.
    if (std::ranges::count(copy.senders, request.from) == 0) copy.senders.push_back(request.from);
  }
  copy.left -= std::min(copy.left, bytes);
  rates_.Used(race->requests[static_cast<size_t>(race->won)].from->node, bytes);
  --stats_.reading;
  ++stats_.pieces;
  stats_.bytes += bytes;
  if (race->won == 1) {
    ++stats_.hedges_won;
    if (copy.second.has_value() && copy.second->member == race->requests[1].from) TakeSecond(copy);
  }
  piece.done(absl::OkStatus());
}

void RemoteObjects::SetRecompute(storage::RemoteCopyId id, storage::Nanos recompute) {
  std::optional<storage::Nanos>& known = copies_.at(id).recompute;
  const bool never = recompute == 0 || known == storage::Nanos{0};
  known = never ? 0 : std::max(known.value_or(0), recompute);
}

void RemoteObjects::Count(Request& request) {
  const uint64_t received_bytes = request.received_bytes->load();
  rates_.Moved(request.from->node, received_bytes - request.counted, clock_.Now());
  request.counted = received_bytes;
}

// Switches to another holder if there is one, which may be faster (Hedge).
void RemoteObjects::AbandonIfSlow(Copy& copy) {
  const bool only = copy.others.empty() && !copy.second.has_value() && !copy.asking && !copy.moving;
  if (!only || copy.slow || copy.recompute.value_or(0) == 0) return;
  uint64_t left = copy.left;
  for (const auto& [first, race] : copy.races) left -= std::min(left, race->requests[0].counted);
  if (rates_.Transfer(copy.object.member->node, left, clock_.Now()) <= *copy.recompute) return;
  copy.slow = true;
  for (const auto& [first, race] : copy.races) transport_.Cancel(race->requests[0].number);
}

void RemoteObjects::Flush() {
  Hedge();
  if (stats_.reading == 0) return;
  for (auto& [id, copy] : copies_) {
    for (const auto& [first, race] : copy.races) {
      for (Request& request : race->requests) {
        if (request.running) Count(request);
      }
    }
    if (!copy.races.empty()) AbandonIfSlow(copy);
  }
}

void RemoteObjects::Hedge() {
  constexpr storage::Nanos kAnswer = 10'000'000;  // approximate time of a second holder's reply
  const storage::Nanos now = clock_.Now();
  while (!late_.empty() && std::get<storage::Nanos>(*late_.begin()) <= now) {
    const storage::RemoteCopyId id = std::get<1>(*late_.begin());
    const uint64_t first = std::get<2>(*late_.begin());
    late_.erase(late_.begin());
    const auto found = copies_.find(id);
    if (found == copies_.end() || stopped_) continue;
    Copy& copy = found->second;
    const auto at = copy.races.find(first);
    if (at == copy.races.end() || copy.moving) continue;
    const std::shared_ptr<Race> race = at->second;
    const auto& [request, hedge] = race->requests;
    if (!request.running || hedge.from != nullptr || now - request.began < options_.least_hedge) continue;
    if (copy.second.has_value()) {
      ++stats_.hedged;
      Start(id, copy, race, 1);
      continue;
    }
    AskSecond(id, copy);
    if (copy.asking) late_.emplace(now + kAnswer, id, first);
  }
}

void RemoteObjects::AskSecond(storage::RemoteCopyId id, Copy& copy) {
  if (copy.asking || copy.others.empty()) return;
  copy.asking = true;
  const std::shared_ptr<const Member> next = copy.others.front();
  copy.others.erase(copy.others.begin());
  opener_.Open(copy.tenant, next, {{copy.object.header.key, copy.object.header.shard}},
               [this, id](Opener::Opened opened) { SecondOpened(id, std::move(opened)); });
}

void RemoteObjects::SecondOpened(storage::RemoteCopyId id, Opener::Opened opened) {
  absl::StatusOr<OpenedObject>& object = opened.front();
  const auto found = copies_.find(id);
  const bool fits = object.ok() && found != copies_.end() && object->encoded == found->second.object.encoded;
  if (object.ok() && !fits) opener_.Close(object->member, object->lease);
  if (found == copies_.end()) return;
  Copy& copy = found->second;
  copy.asking = false;
  if (fits) copy.second = *std::move(object);
  if (!std::exchange(copy.moving, false)) return;
  // The first one has failed meanwhile.
  Move(id, copy, absl::UnavailableError("the second holder does not have the object"));
}

// The first holder's remaining requests fail, and are repeated at the second one.
void RemoteObjects::TakeSecond(Copy& copy) {
  opener_.Close(copy.object.member, copy.object.lease);
  copy.object = *std::exchange(copy.second, std::nullopt);
  ++copy.holder_generation;
  ++stats_.moved;
}

// A failed second holder would be asked for every late piece, so it is dropped; the next late piece opens another one.
void RemoteObjects::DropSecond(Copy& copy, const Member& member) {
  if (!copy.second.has_value() || copy.second->member->incarnation != member.incarnation) return;
  opener_.Close(copy.second->member, copy.second->lease);
  copy.second.reset();
}

void RemoteObjects::Move(storage::RemoteCopyId id, Copy& copy, const absl::Status& why) {
  if (copy.slow) {
    copy.lost = true;
    return Lose(copy, absl::AbortedError("computing the object is faster than fetching it"));
  }
  if (!copy.lost && !stopped_) {
    Log(LogLevel::kWarning, "fetch from a peer failed",
        {{"peer", copy.object.member->node}, {"error", std::string(why.message())}});
  }
  if (copy.second.has_value() && !stopped_) {
    TakeSecond(copy);
    return GoOn(id, copy);
  }
  if (copy.asking && !stopped_) {  // its reply decides
    copy.moving = true;
    return;
  }
  copy.lost = copy.others.empty() || stopped_;
  if (copy.lost) return Lose(copy, why);
  copy.moving = true;
  const std::shared_ptr<const Member> next = copy.others.front();
  copy.others.erase(copy.others.begin());
  opener_.Open(copy.tenant, next, {{copy.object.header.key, copy.object.header.shard}},
               [this, id](Opener::Opened opened) { Moved(id, std::move(opened)); });
}

void RemoteObjects::Moved(storage::RemoteCopyId id, Opener::Opened opened) {
  absl::StatusOr<OpenedObject>& object = opened.front();
  const auto found = copies_.find(id);
  if (found == copies_.end()) {  // no reader is left
    if (object.ok()) opener_.Close(object->member, object->lease);
    return;
  }
  Copy& copy = found->second;
  copy.moving = false;
  if (object.ok() && object->encoded != copy.object.encoded) {
    // The same text published by another engine: its bytes do not match those received already.
    opener_.Close(object->member, object->lease);
    object = absl::FailedPreconditionError("the next holder has different bytes for the same text");
  }
  if (!object.ok()) return Move(id, copy, object.status());
  opener_.Close(copy.object.member, copy.object.lease);
  copy.object = *std::move(object);
  ++copy.holder_generation;
  ++stats_.moved;
  GoOn(id, copy);
}

void RemoteObjects::GoOn(storage::RemoteCopyId id, Copy& copy) {
  for (Piece& piece : std::exchange(copy.waiting, {})) Fetch(id, copy, std::move(piece));
}

void RemoteObjects::Lose(Copy& copy, const absl::Status& why) {
  // The last of these calls may release the copy.
  std::vector<Piece> lost = std::exchange(copy.waiting, {});
  stats_.reading -= lost.size();
  stats_.failed_pieces += lost.size();
  for (Piece& piece : lost) CountAt(piece, std::nullopt);
  for (const Piece& piece : lost) piece.done(why);
}

void RemoteObjects::Release(storage::RemoteCopyId id) {
  const auto copy = copies_.extract(id);
  stats_.copies = copies_.size();
  damaged_.Released(id, copy.mapped().object.header.key, std::move(copy.mapped().senders));
  opener_.Close(copy.mapped().object.member, copy.mapped().object.lease);
  if (const auto& second = copy.mapped().second; second.has_value()) opener_.Close(second->member, second->lease);
}

void RemoteObjects::Damaged(storage::RemoteCopyId id) {
  const storage::Nanos now = clock_.Now();
  DamagedCopies::Members senders = damaged_.Found(id, now);
  if (const auto open = copies_.find(id); open != copies_.end()) {
    senders = open->second.senders;
    for (const auto& sender : senders) damaged_.Add(*sender, open->second.object.header.key, now);
  }
  for (const auto& sender : senders) {
    Log(LogLevel::kWarning, "checksum mismatch in an object from a peer", {{"peer", sender->node}});
  }
}

void RemoteObjects::Tick(PeerAsker& asker) {
  struct ToRenew {
    std::shared_ptr<const Member> member;
    PeerRenew renew;
    std::vector<storage::RemoteCopyId> copies;
  };
  std::map<uint64_t, ToRenew> due;
  constexpr storage::Nanos kHalf = storage::Nanos{Opener::kLeaseMillis} * 1'000'000 / 2;
  const storage::Nanos now = clock_.Now();
  const auto renew = [&](storage::RemoteCopyId id, const OpenedObject& object) {
    ToRenew& of_node = due[object.member->incarnation];
    const bool full = of_node.copies.size() >= limits::kMaxPeerLeasesPerCall;
    if (object.leased_until - now > kHalf || full) return;
    of_node.member = object.member;
    of_node.renew.leases.push_back(object.lease);
    of_node.copies.push_back(id);
  };
  for (const auto& [id, copy] : copies_) {
    renew(id, copy.object);
    if (copy.second.has_value()) renew(id, *copy.second);
  }
  for (auto& [incarnation, of_node] : due) {
    if (of_node.copies.empty()) continue;
    of_node.renew.lease_ms = Opener::kLeaseMillis;
    const auto renewed = [this, now, leases = of_node.renew.leases,
                          copies = of_node.copies](const absl::StatusOr<std::vector<uint32_t>>& reply) {
      for (size_t i = 0; reply.ok() && i < copies.size(); ++i) {
        Renewed(copies[i], leases[i], now + storage::Nanos{1'000'000} * (*reply)[i]);
      }
    };
    asker.Renew(*of_node.member, std::move(of_node.renew),
                [this, renewed](absl::StatusOr<std::vector<uint32_t>> reply) {
                  const auto shared = std::make_shared<const absl::StatusOr<std::vector<uint32_t>>>(std::move(reply));
                  loop_.PostCompletion(storage::kNoTenant, [renewed, shared] { renewed(*shared); });
                });
  }
}

// The copy may have switched to another holder meanwhile.
void RemoteObjects::Renewed(storage::RemoteCopyId id, const PeerLease& lease, storage::Nanos until) {
  const auto found = copies_.find(id);
  if (found == copies_.end()) return;
  Copy& copy = found->second;
  if (copy.object.lease == lease) copy.object.leased_until = until;
  if (copy.second.has_value() && copy.second->lease == lease) copy.second->leased_until = until;
}

std::map<std::string, RemoteObjects::Held> RemoteObjects::HeldByNode() const {
  std::map<std::string, Held> held;
  const auto add = [&](const OpenedObject& object) {
    Held& of_node = held[object.member->node];
    ++of_node.copies;
    of_node.bytes += object.header.bytes;
  };
  for (const auto& [id, copy] : copies_) {
    add(copy.object);
    if (copy.second.has_value()) add(*copy.second);
  }
  return held;
}

void RemoteObjects::Stop() {
  if (std::exchange(stopped_, true)) return;
  for (const auto& [id, copy] : copies_) {
    for (const auto& [first, race] : copy.races) {
      for (const Request& request : race->requests) {
        if (request.running) transport_.Cancel(request.number);
      }
    }
  }
}

void RemoteObjects::Gone(const Member& member) {
  std::vector<uint64_t> requests;
  for (const auto& [id, copy] : copies_) {
    for (const auto& [first, race] : copy.races) {
      for (const Request& request : race->requests) {
        const bool there = request.running && request.from->incarnation == member.incarnation;
        if (there) requests.push_back(request.number);
      }
    }
  }
  for (const uint64_t request : requests) transport_.Cancel(request);
}

}  // namespace ashlar::daemon
