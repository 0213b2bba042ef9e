// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/loans.h"

#include <algorithm>
#include <set>
#include <utility>

namespace ashlar::daemon {
namespace {

constexpr uint64_t kReadBytes = 1024 * 1024;  // per read

}  // namespace

// The first requests over a new connection use messages, because its transport is not known yet.
bool Loans::Borrows(const PeerConnection& connection, const Transfer& transfer) {
  return connection.reads && transfer.role == Transfer::Role::kFetching && transfer.offset <= transfer.places.bytes() &&
         transfer.length <= transfer.places.bytes() - transfer.offset;
}

void Loans::Lent(PeerConnection& connection, const Message& message) {
  Transfer* const transfer = transfers_.OfTicket(connection, message.to);
  if (transfer == nullptr || transfer->places.empty() || transfer->lent) {  // no caller waits for it any more
    connections_.ucx().SendText(*connection.link, {.kind = MessageKind::kReturned, .to = message.from}, "");
    return;
  }
  transfer->lent = true;
  transfer->theirs = message.from;
  for (const RemoteArena& arena : transfer->places.memory().arenas) {
    absl::StatusOr<std::unique_ptr<RemoteKey>> key = connections_.ucx().Unpack(*connection.link, arena.key);
    if (!key.ok()) {
      transfers_.End(message.to.number, key.status());
      return;
    }
    transfer->keys.push_back(*std::move(key));
  }
  connection.sending.push_back(message.to.number);
}

// Reads bytes that are contiguous at both ends.
void Loans::ReadPiece(PeerConnection& connection, uint64_t number, Transfer& transfer) {
  const RemotePlaces::Place there = transfer.places.At(transfer.offset + transfer.sent);
  std::span<std::byte> here;
  transfer.targets.ForEach(transfer.sent, std::min({kReadBytes, there.bytes, transfer.length - transfer.sent}),
                           [&](std::span<std::byte> piece) {
                             if (!here.empty() && here.data() + here.size() != piece.data()) return false;
                             here = here.empty() ? piece : std::span(here.data(), here.size() + piece.size());
                             return true;
                           });
  const uint64_t bytes = here.size(), link = connection.link->id;
  transfer.sent += bytes;
  ++transfer.sends;
  connection.bytes_queued += bytes;
  if (transfer.sent < transfer.length) connection.sending.push_back(number);
  connections_.ucx().Get(*connection.link, *transfer.keys[there.arena], there.address, here,
                         [this, link, number, bytes](const absl::Status& status) {
                           if (status.ok()) counts_.read_bytes += bytes;
                           transfers_.Moved(link, number, bytes, status);
                         });
}

void Loans::Lend(Transfer& transfer) {
  transfer.lent = true;
  transfer.sends = 1;
  connections_.ucx().SendText(*transfer.link,
                              {.kind = MessageKind::kLent, .to = transfer.theirs, .from = transfer.ticket}, "");
}

void Loans::Returned(const PeerConnection& connection, const Message& message) {
  const Transfer* const found = transfers_.Find(message.to.number);  // it may have ended; then waits for it
  const bool valid = found != nullptr && found->link == connection.link && found->role == Transfer::Role::kLending &&
                     SameGrant(found->ticket, message.to);
  if (!valid || !found->lent) {
    ++counts_.late;
    return;
  }
  if (!found->ended) connection.link->bytes_sent += found->length;
  transfers_.Return(message.to.number);
}

void Loans::ReturnAll(const PeerConnection& connection) {
  const std::set<uint64_t> under_way = connection.transfers;
  for (const uint64_t number : under_way) {
    const Transfer* const found = transfers_.Find(number);
    if (found != nullptr && found->role == Transfer::Role::kLending && found->lent) transfers_.Return(number);
  }
}

bool Loans::Overdue(const PeerConnection& connection, int64_t now) const {
  if (transfers_.recalled() == 0) return false;
  return std::ranges::any_of(connection.transfers, [&](uint64_t number) {
    const Transfer& transfer = *transfers_.Find(number);
    return transfer.role == Transfer::Role::kLending && transfer.lent && transfer.ended &&
           now - transfer.ended_at > options_.silence;
  });
}

}  // namespace ashlar::daemon
