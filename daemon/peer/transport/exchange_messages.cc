// SPDX-License-Identifier: Apache-2.0
// Handles messages. Any of them may come from an attacker.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/exchange.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kPieceBytes = Transport::kMessageBytes;  // fits in a TCP segment (ucx_settings.cc)
constexpr size_t kMaxPieces = 15;                           // spans per message
constexpr uint64_t kQueuedBytes = 2 * 1024 * 1024;          // per connection: handed to UCX but not sent
constexpr size_t kMaxQueuedMessages = 1024;                 // disconnects a peer that requests but does not read

}  // namespace

void Exchange::Handle(Connection& connection, const Message& message, std::span<const std::byte> payload) {
  if (connection.link->sends > kMaxQueuedMessages) {
    Drop(connection, "the peer does not read its replies");
    return;
  }
  switch (message.kind) {
    case MessageKind::kFetch:
    case MessageKind::kBorrow:
      Serve(connection, message);
      return;
    case MessageKind::kData:
      TakeData(connection, message, payload);
      return;
    case MessageKind::kFailed: {
      Transfer* const transfer = OurTicket(connection, message.to);
      if (transfer == nullptr) return;
      if (transfer->peer != nullptr) {
        const std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
        End(message.to.number, absl::Status(static_cast<absl::StatusCode>(message.code), text));
      } else {
        ++counts_.refused;
      }
      return;
    }
    case MessageKind::kCancel: {
      const auto asked = connection.asked.find(message.from.number);
      if (asked == connection.asked.end()) return;
      if (SameGrant(transfers_.at(asked->second)->theirs, message.from)) {
        End(asked->second, absl::CancelledError("the peer cancelled the request"));
      }
      return;
    }
    case MessageKind::kPing:
      ucx_->SendText(*connection.link, {.kind = MessageKind::kPong}, "");
      return;
    case MessageKind::kPong:
      return;
    case MessageKind::kLent:
      Lent(connection, message);
      return;
    case MessageKind::kReturned:
      Returned(connection, message);
      return;
  }
}

// Finds the transfer of one of our tickets on this connection; null if it has ended or belongs to another connection.
Exchange::Transfer* Exchange::OurTicket(const Connection& connection, const Grant& ticket) {
  const auto found = transfers_.find(ticket.number);
  const bool valid = found != transfers_.end() && found->second->link == connection.link &&
                     SameGrant(found->second->ticket, ticket) && !found->second->ended;
  if (!valid) ++counts_.late;
  return valid ? found->second.get() : nullptr;
}

std::shared_ptr<Exchange::Allowed> Exchange::FindGrant(uint64_t number) const {
  MutexLock lock(allowed_mutex_);
  const auto found = allowed_.find(number);
  return found == allowed_.end() ? nullptr : found->second;
}

absl::Status Exchange::Judge(const Connection& connection, const Message& message,
                             std::shared_ptr<Allowed>& allowed) const {
  std::shared_ptr<Allowed> found = FindGrant(message.to.number);
  // Replies identically to an unknown number and a wrong secret.
  if (found == nullptr || !SameGrant(found->grant, message.to)) {
    return absl::PermissionDeniedError("grant: unknown");
  }
  if (message.offset > found->bytes || message.length > found->bytes - message.offset) {
    return absl::OutOfRangeError(absl::StrCat("offset ", message.offset, ", length ", message.length,
                                              ": the grant has ", found->bytes, " bytes"));
  }
  if (message.kind == MessageKind::kBorrow && !connection.reads) {
    return absl::FailedPreconditionError("the connection does not support RDMA reads");
  }
  if (connection.asked.contains(message.from.number)) return absl::AlreadyExistsError("ticket: already in use");
  if (connection.asked.size() >= options_.requests_of_a_connection) {
    return absl::ResourceExhaustedError("too many requests in flight on this connection");
  }
  allowed = std::move(found);
  return absl::OkStatus();
}

void Exchange::Serve(Connection& connection, const Message& message) {
  std::shared_ptr<Allowed> allowed;
  if (const absl::Status status = Judge(connection, message, allowed); !status.ok()) {
    ++counts_.refused;
    Suspect(connection, absl::StrCat("refused: ", status.message()));
    Refuse(connection, message.from, status);
    return;
  }
  const uint64_t number = NextNumber();
  auto transfer = std::make_unique<Transfer>();
  transfer->role = message.kind == MessageKind::kFetch ? Role::kServing : Role::kLending;
  transfer->ticket = {number, DrawSecret()};
  transfer->theirs = message.from;
  transfer->link = connection.link;
  transfer->allowed = allowed;
  transfer->offset = message.offset;
  transfer->length = message.length;
  transfer->deadline =
      Now() + static_cast<int64_t>(std::min<uint64_t>(message.patience, static_cast<uint64_t>(options_.deadline)));
  deadlines_.emplace(transfer->deadline, number);
  allowed->transfers.insert(number);
  connection.transfers.insert(number);
  connection.asked[message.from.number] = number;
  transfers_[number] = std::move(transfer);
  allowed->granted->Resolve(
      message.offset, message.length, [this, later = later_, number](absl::StatusOr<Spans> spans) {
        later([this, number, spans = std::move(spans)]() mutable { Resolved(number, std::move(spans)); });
      });
}

void Exchange::Resolved(uint64_t number, absl::StatusOr<Spans> spans) {
  const auto found = transfers_.find(number);
  if (found == transfers_.end() || found->second->ended || found->second->ready) return;
  Transfer& transfer = *found->second;
  if (!spans.ok()) {
    End(number, spans.status());
    return;
  }
  const SpanList<std::byte> list(*spans);
  if (list.bytes() != transfer.length) {
    End(number,
        absl::InternalError(absl::StrCat("the owner listed ", list.bytes(), " bytes; expected ", transfer.length)));
    return;
  }
  Connection* const connection = Of(*transfer.link);  // the connection is not lost, since that ends its transfers
  transfer.ready = true;
  if (transfer.role == Role::kLending) {
    Lend(transfer);
  } else {
    transfer.sources = SpanList<const std::byte>(ConstSpans(spans->begin(), spans->end()));
    connection->sending.push_back(number);
  }
}

void Exchange::TakeData(Connection& connection, const Message& message, std::span<const std::byte> payload) {
  Transfer* const transfer = OurTicket(connection, message.to);
  if (transfer == nullptr) return;
  const bool fetches = transfer->role == Role::kFetching && transfer->places.empty();
  if (!fetches || message.offset > transfer->length || payload.size() > transfer->length - message.offset ||
      !transfer->received.Add(message.offset, message.offset + payload.size())) {
    ++counts_.refused;
    return;
  }
  const std::byte* from = payload.data();
  transfer->targets.ForEach(message.offset, payload.size(), [&](std::span<std::byte> piece) {
    if (const Transport::CopyIn* const way = WayInto(piece.data())) {
      (*way)(piece.data(), {from, piece.size()});
    } else {
      std::memcpy(piece.data(), from, piece.size());
    }
    from += piece.size();
    return true;
  });
  if (transfer->came != nullptr) transfer->came->fetch_add(payload.size());
  if (transfer->received.bytes() == transfer->length) End(message.to.number, absl::OkStatus());
}

void Exchange::Refuse(Connection& connection, const Grant& to, const absl::Status& why) {
  ucx_->SendText(*connection.link,
                 {.kind = MessageKind::kFailed, .code = static_cast<uint8_t>(why.raw_code()), .to = to},
                 std::string(why.message().substr(0, kMaxErrorText)));
}

// Sends pieces of the connection's transfers in turn, as far as UCX may queue them.
bool Exchange::Pump(Connection& connection) {
  bool some = false;
  while (!connection.lost && !connection.sending.empty() && connection.bytes_queued < kQueuedBytes) {
    const uint64_t number = connection.sending.front();
    connection.sending.erase(connection.sending.begin());
    const auto found = transfers_.find(number);
    if (found == transfers_.end() || found->second->ended) continue;
    if (found->second->role == Role::kFetching) {
      ReadPiece(connection, number, *found->second);
    } else {
      SendPiece(connection, number, *found->second);
    }
    some = true;
  }
  return some;
}

void Exchange::SendPiece(Connection& connection, uint64_t number, Transfer& transfer) {
  ConstSpans pieces;
  uint64_t bytes = 0;
  transfer.sources.ForEach(transfer.sent, std::min(kPieceBytes, transfer.length - transfer.sent),
                           [&](std::span<const std::byte> piece) {
                             pieces.push_back(piece);
                             bytes += piece.size();
                             return pieces.size() < kMaxPieces;
                           });
  const Message message{.kind = MessageKind::kData, .to = transfer.theirs, .offset = transfer.sent};
  transfer.sent += bytes;
  ++transfer.sends;
  connection.bytes_queued += bytes;
  if (transfer.sent < transfer.length) connection.sending.push_back(number);
  const uint64_t link = connection.link->id;
  ucx_->Send(*connection.link, message, std::move(pieces),
             [this, link, number, bytes](const absl::Status& status) { Moved(link, number, bytes, status); });
}

}  // namespace ashlar::daemon
