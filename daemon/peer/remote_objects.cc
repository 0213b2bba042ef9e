#include "daemon/peer/remote_objects.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/runtime/host_port.h"
#include "daemon/runtime/log.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxReading = 256;  // pieces

// The part of the extents that comes over the network: without the header, which is written here, and without what lies
// behind the object's end.
Spans WriteHeader(const OpenedObject& object, uint64_t first, const std::vector<std::byte*>& targets) {
  Spans spans;
  for (size_t i = 0; i < targets.size(); ++i) {
    const uint64_t begin = (first + i) * limits::kExtentBytes;
    const uint64_t end = std::min(begin + limits::kExtentBytes, object.header.bytes);
    uint64_t skip = 0;
    if (first + i == 0) {
      skip = std::min<uint64_t>(object.encoded.size(), end);
      std::memcpy(targets[i], object.encoded.data(), skip);
    }
    if (begin + skip < end) spans.push_back({targets[i] + skip, end - begin - skip});
  }
  return spans;
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
  copies_[id] = {.tenant = tenant, .object = std::move(object), .others = std::move(others)};
  stats_.copies = copies_.size();
  return id;
}

bool RemoteObjects::Read(storage::RemoteCopyId id, uint64_t first, std::vector<std::byte*> targets,
                         std::function<void(absl::Status)> done) {
  if (stats_.reading >= kMaxReading) return false;
  ++stats_.reading;
  Copy& copy = copies_.at(id);
  Piece piece{first, std::move(targets), std::move(done)};
  if (copy.moving) {
    copy.waiting.push_back(std::move(piece));
  } else {
    Fetch(id, copy, std::move(piece));
  }
  return true;
}

void RemoteObjects::Fetch(storage::RemoteCopyId id, Copy& copy, Piece piece) {
  const Member& member = *copy.object.member;
  const uint64_t skipped = piece.first == 0 ? copy.object.encoded.size() : 0;
  Spans spans = WriteHeader(copy.object, piece.first, piece.targets);
  const uint64_t bytes = BytesOf(spans);
  const storage::Nanos expected = rates_.Estimate(member.node, bytes);
  const auto wanted = static_cast<storage::Nanos>(options_.patience * static_cast<double>(expected));
  const storage::Nanos patience = std::clamp(wanted, options_.least_patience, options_.most_patience);
  const storage::Nanos began = clock_.Now();
  const uint64_t first = piece.first;
  const auto shared = std::make_shared<Piece>(std::move(piece));
  auto ended = [this, id, tenant = copy.tenant, holder = copy.holder, shared, began](const absl::Status& status) {
    loop_.PostCompletion(tenant, [this, id, holder, shared, began, status] {
      Ended(id, holder, std::move(*shared), clock_.Now() - began, status);
    });
  };
  if (stopped_) return ended(absl::CancelledError("this node leaves the cluster"));
  const absl::StatusOr<HostPort> address = ParseHostPort(member.transport_address);
  if (!address.ok()) return ended(address.status());
  if (bytes == 0) return ended(absl::OkStatus());
  copy.requests[first] = transport_.Fetch(*address, copy.object.grant, first * limits::kExtentBytes + skipped,
                                          std::move(spans), patience, std::move(ended));
}

void RemoteObjects::Ended(storage::RemoteCopyId id, uint64_t holder, Piece piece, storage::Nanos took,
                          const absl::Status& status) {
  Copy& copy = copies_.at(id);
  copy.requests.erase(piece.first);
  if (status.ok()) {
    const uint64_t begin = piece.first * limits::kExtentBytes;
    const uint64_t bytes = std::min(piece.targets.size() * limits::kExtentBytes, copy.object.header.bytes - begin);
    if (holder == copy.holder) rates_.Came(copy.object.member->node, bytes, took);
    --stats_.reading;
    ++stats_.pieces;
    stats_.bytes += bytes;
    return piece.done(absl::OkStatus());
  }
  const bool first_error = holder == copy.holder && !copy.moving;
  copy.waiting.push_back(std::move(piece));
  if (first_error) return Move(id, copy, status);
  if (copy.moving) return;
  // Another holder has taken over meanwhile.
  for (Piece& again : std::exchange(copy.waiting, {})) Fetch(id, copy, std::move(again));
}

void RemoteObjects::Move(storage::RemoteCopyId id, Copy& copy, const absl::Status& why) {
  if (!copy.lost && !stopped_) {
    Log(LogLevel::kWarning, "an object's bytes did not come from a peer",
        {{"peer", copy.object.member->node}, {"error", std::string(why.message())}});
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
  if (found == copies_.end()) {  // nobody reads it any more
    if (object.ok()) opener_.Close(object->member, object->lease);
    return;
  }
  Copy& copy = found->second;
  copy.moving = false;
  if (object.ok() && object->encoded != copy.object.encoded) {
    // The same text, published by another engine: its bytes do not fit to those that have come already.
    opener_.Close(object->member, object->lease);
    object = absl::FailedPreconditionError("the next holder has other bytes of the same text");
  }
  if (!object.ok()) return Move(id, copy, object.status());
  opener_.Close(copy.object.member, copy.object.lease);
  copy.object = *std::move(object);
  ++copy.holder;
  ++stats_.moved;
  for (Piece& piece : std::exchange(copy.waiting, {})) Fetch(id, copy, std::move(piece));
}

void RemoteObjects::Lose(Copy& copy, const absl::Status& why) {
  // The last of these calls may release the copy.
  std::vector<Piece> lost = std::exchange(copy.waiting, {});
  stats_.reading -= lost.size();
  stats_.failed_pieces += lost.size();
  for (const Piece& piece : lost) piece.done(why);
}

void RemoteObjects::Release(storage::RemoteCopyId id) {
  const auto copy = copies_.extract(id);
  stats_.copies = copies_.size();
  opener_.Close(copy.mapped().object.member, copy.mapped().object.lease);
}

void RemoteObjects::Tick(PeerAsker& asker) {
  struct Due {
    std::shared_ptr<const Member> member;
    PeerRenew renew;
    std::vector<storage::RemoteCopyId> copies;
  };
  std::map<uint64_t, Due> due;
  constexpr storage::Nanos kHalf = storage::Nanos{Opener::kLeaseMillis} * 1'000'000 / 2;
  const storage::Nanos now = clock_.Now();
  for (const auto& [id, copy] : copies_) {
    Due& of_node = due[copy.object.member->incarnation];
    const bool full = of_node.copies.size() >= limits::kMaxPeerLeasesPerCall;
    if (copy.object.leased_until - now > kHalf || full) continue;
    of_node.member = copy.object.member;
    of_node.renew.leases.push_back(copy.object.lease);
    of_node.copies.push_back(id);
  }
  for (auto& [incarnation, of_node] : due) {
    if (of_node.copies.empty()) continue;
    of_node.renew.lease_ms = Opener::kLeaseMillis;
    const auto renewed = [this, now, copies = of_node.copies](const absl::StatusOr<std::vector<uint32_t>>& reply) {
      for (size_t i = 0; reply.ok() && i < copies.size(); ++i) {
        const auto copy = copies_.find(copies[i]);
        if (copy == copies_.end()) continue;
        copy->second.object.leased_until = now + storage::Nanos{1'000'000} * (*reply)[i];
      }
    };
    asker.Renew(*of_node.member, std::move(of_node.renew),
                [this, renewed](absl::StatusOr<std::vector<uint32_t>> reply) {
                  const auto shared = std::make_shared<const absl::StatusOr<std::vector<uint32_t>>>(std::move(reply));
                  loop_.PostCompletion(storage::kNoTenant, [renewed, shared] { renewed(*shared); });
                });
  }
}

void RemoteObjects::Stop() {
  if (std::exchange(stopped_, true)) return;
  for (const auto& [id, copy] : copies_) {
    for (const auto& [first, request] : copy.requests) transport_.Cancel(request);
  }
}

void RemoteObjects::Gone(const Member& member) {
  std::vector<uint64_t> requests;
  for (const auto& [id, copy] : copies_) {
    if (copy.object.member->incarnation != member.incarnation) continue;
    for (const auto& [first, request] : copy.requests) requests.push_back(request);
  }
  for (const uint64_t request : requests) transport_.Cancel(request);
}

}  // namespace ashlar::daemon
