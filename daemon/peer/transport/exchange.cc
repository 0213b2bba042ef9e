// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/exchange.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kPieceBytes = Transport::kMessageBytes;  // fits in a TCP segment (ucx_settings.cc)
constexpr size_t kMaxPieces = 15;                           // spans per message
constexpr uint64_t kQueuedBytes = 2 * 1024 * 1024;          // per connection: handed to UCX but not sent
constexpr size_t kMaxQueuedMessages = 1024;                 // disconnects a peer that requests but does not read

}  // namespace

Exchange::Exchange(const TransportOptions& options, TransportSurroundings surroundings,
                   std::function<void(std::function<void()>)> later)
    : options_(options),
      surroundings_(std::move(surroundings)),
      later_(std::move(later)),
      peers_(options_, surroundings_.random()),
      connections_(options_, surroundings_, peers_, counts_, *this),
      transfers_(surroundings_, connections_, peers_, counts_),
      loans_(options_, connections_, transfers_, counts_) {}

absl::Status Exchange::Open() {
  return connections_.Open();
}

Exchange::~Exchange() {
  transfers_.Close();
  connections_.Close();
  grants_.Clear();
}

void Exchange::Begin(Request request) {
  auto transfer = std::make_unique<Transfer>();
  const uint64_t number = request.number;
  PeerState& peer = peers_.Of(request.peer);
  transfer->role = Transfer::Role::kFetching;
  transfer->ticket = {number, DrawSecret()};
  transfer->peer = &peer;
  transfer->grant = request.grant;
  transfer->offset = request.offset;
  transfer->targets = SpanList<std::byte>(std::move(request.targets));
  transfer->length = transfer->targets.bytes();
  transfer->received_bytes = std::move(request.received_bytes);
  if (request.memory != nullptr) transfer->places = RemotePlaces(std::move(request.memory));
  transfer->deadline = request.deadline;
  transfer->done = std::move(request.done);
  const bool overflows = transfer->offset > INT64_MAX || transfer->length > INT64_MAX - transfer->offset;
  const uint64_t length = transfer->length;
  transfers_.Add(number, std::move(transfer));
  peers_.Wait(peer, number, length);
  if (length == 0 || overflows) {
    transfers_.End(number, absl::InvalidArgumentError(length == 0 ? "length: 0; expected at least 1"
                                                                  : "offset + length overflows"));
  }
}

void Exchange::Cancel(uint64_t request) {
  const Transfer* const found = transfers_.Find(request);
  if (found == nullptr || found->role != Transfer::Role::kFetching) return;
  transfers_.End(request, absl::CancelledError("cancelled"));
}

void Exchange::KeepPeers(const std::vector<HostPort>& peers) {
  peers_.Keep(peers, [this](PeerState& peer) { connections_.Remove(peer); });
}

void Exchange::Revoke(uint64_t number, std::function<void()> quiesced) {
  const std::shared_ptr<Allowed> allowed = grants_.Remove(number);  // the last transfer under it releases it
  if (allowed == nullptr) {
    if (quiesced) quiesced();
    return;
  }
  allowed->quiesced = std::move(quiesced);
  transfers_.EndEach(allowed->transfers, absl::FailedPreconditionError("the grant was revoked"));
}

void Exchange::Register(std::byte* data, uint64_t bytes, MemoryType type, Transport::CopyIn copy_in) {
  const absl::Status status = areas_.Register(connections_.ucx(), data, bytes, type, std::move(copy_in));
  if (!status.ok() && options_.log) {
    options_.log("transport memory: not registered for RDMA", absl::StrCat(bytes, " bytes"),
                 std::string(status.message()));
  }
}

void Exchange::StartRequest(uint64_t number) {
  Transfer& transfer = *transfers_.Find(number);
  PeerState& peer = *transfer.peer;
  if (peer.link == nullptr) {
    if (const auto connected = connections_.Connect(peer); !connected.ok()) {
      return transfers_.End(number, connected.status());
    }
  }
  peers_.Start(peer, number);
  transfer.link = peer.link;
  PeerConnection& connection = *connections_.Of(*peer.link);
  const int64_t now = Now();
  if (connection.transfers.empty()) connection.heard = now;  // nothing was expected before
  connection.transfers.insert(number);
  if (!Loans::Borrows(connection, transfer)) transfer.places = {};
  // The receiving thread copies the bytes of messages.
  if (transfer.places.empty() && !areas_.CanCopyInto(connections_.ucx(), transfer.targets)) {
    return transfers_.End(number, absl::FailedPreconditionError("this memory can only be filled by RDMA reads"));
  }
  connections_.ucx().SendText(*peer.link,
                              {.kind = transfer.places.empty() ? MessageKind::kFetch : MessageKind::kBorrow,
                               .to = transfer.grant,
                               .from = transfer.ticket,
                               .offset = transfer.offset,
                               .length = transfer.length,
                               .patience = static_cast<uint64_t>(std::max<int64_t>(transfer.deadline - now, 1))},
                              "");
}

bool Exchange::Progress() {
  bool some = connections_.ucx().Progress();
  connections_.CloseDropped();
  const int64_t now = Now();
  transfers_.Expire(now);
  connections_.Watch(now);
  if (peers_.TakeMayStart()) {
    while (const std::optional<uint64_t> next = peers_.Next()) StartRequest(*next);
  }
  for (auto& [id, connection] : connections_.all()) some |= Pump(connection);
  return some || peers_.may_start();
}

int64_t Exchange::due() const {
  const bool watches = transfers_.recalled() > 0 || connections_.AnyInUse();
  const int64_t deadline = transfers_.NextDeadline();
  return watches ? std::min(deadline, connections_.NextWatch()) : deadline;
}

TransportStats Exchange::Stats() const {
  TransportStats stats = counts_;
  stats.registered_bytes = areas_.bytes();
  stats.grants = grants_.size();
  transfers_.AddTo(stats);
  peers_.AddTo(stats);
  connections_.AddTo(stats);
  return stats;
}

void Exchange::Lost(PeerConnection& connection, const absl::Status& why) {
  transfers_.EndEach(connection.transfers, absl::UnavailableError(why.message()));
}

void Exchange::Closed(PeerConnection& connection) {
  loans_.ReturnAll(connection);
}

bool Exchange::KeepsLoan(const PeerConnection& connection, int64_t now) const {
  return loans_.Overdue(connection, now);
}

void Exchange::Received(PeerConnection& connection, const Message& message, std::span<const std::byte> payload) {
  if (connection.link->sends > kMaxQueuedMessages) {
    connections_.Drop(connection, "the peer does not read its replies");
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
      Transfer* const transfer = transfers_.OfTicket(connection, message.to);
      if (transfer == nullptr) return;
      if (transfer->peer != nullptr) {
        const std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
        transfers_.End(message.to.number, absl::Status(static_cast<absl::StatusCode>(message.code), text));
      } else {
        ++counts_.refused;
      }
      return;
    }
    case MessageKind::kCancel: {
      const auto asked = connection.asked.find(message.from.number);
      if (asked == connection.asked.end()) return;
      if (SameGrant(transfers_.Find(asked->second)->theirs, message.from)) {
        transfers_.End(asked->second, absl::CancelledError("the peer cancelled the request"));
      }
      return;
    }
    case MessageKind::kPing:
      connections_.ucx().SendText(*connection.link, {.kind = MessageKind::kPong}, "");
      return;
    case MessageKind::kPong:
      return;
    case MessageKind::kLent:
      loans_.Lent(connection, message);
      return;
    case MessageKind::kReturned:
      loans_.Returned(connection, message);
      return;
  }
}

absl::Status Exchange::Judge(const PeerConnection& connection, const Message& message,
                             std::shared_ptr<Allowed>& allowed) const {
  std::shared_ptr<Allowed> found = grants_.Find(message.to.number);
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

void Exchange::Serve(PeerConnection& connection, const Message& message) {
  std::shared_ptr<Allowed> allowed;
  if (const absl::Status status = Judge(connection, message, allowed); !status.ok()) {
    ++counts_.refused;
    connections_.Suspect(connection, absl::StrCat("refused: ", status.message()));
    transfers_.Refuse(connection, message.from, status);
    return;
  }
  const uint64_t number = NextNumber();
  auto transfer = std::make_unique<Transfer>();
  transfer->role = message.kind == MessageKind::kFetch ? Transfer::Role::kServing : Transfer::Role::kLending;
  transfer->ticket = {number, DrawSecret()};
  transfer->theirs = message.from;
  transfer->link = connection.link;
  transfer->allowed = allowed;
  transfer->offset = message.offset;
  transfer->length = message.length;
  transfer->deadline =
      Now() + static_cast<int64_t>(std::min<uint64_t>(message.patience, static_cast<uint64_t>(options_.deadline)));
  allowed->transfers.insert(number);
  connection.transfers.insert(number);
  connection.asked[message.from.number] = number;
  transfers_.Add(number, std::move(transfer));
  allowed->granted->Resolve(
      message.offset, message.length, [this, later = later_, number](absl::StatusOr<Spans> spans) {
        later([this, number, spans = std::move(spans)]() mutable { Resolved(number, std::move(spans)); });
      });
}

void Exchange::Resolved(uint64_t number, absl::StatusOr<Spans> spans) {
  Transfer* const found = transfers_.Find(number);
  if (found == nullptr || found->ended || found->ready) return;
  Transfer& transfer = *found;
  if (!spans.ok()) {
    transfers_.End(number, spans.status());
    return;
  }
  const SpanList<std::byte> list(*spans);
  if (list.bytes() != transfer.length) {
    transfers_.End(number, absl::InternalError(
                               absl::StrCat("the owner listed ", list.bytes(), " bytes; expected ", transfer.length)));
    return;
  }
  PeerConnection* const connection = connections_.Of(*transfer.link);  // not lost: that would have ended the transfer
  transfer.ready = true;
  if (transfer.role == Transfer::Role::kLending) {
    loans_.Lend(transfer);
  } else {
    transfer.sources = SpanList<const std::byte>(ConstSpans(spans->begin(), spans->end()));
    connection->sending.push_back(number);
  }
}

void Exchange::TakeData(PeerConnection& connection, const Message& message, std::span<const std::byte> payload) {
  Transfer* const transfer = transfers_.OfTicket(connection, message.to);
  if (transfer == nullptr) return;
  const bool fetches = transfer->role == Transfer::Role::kFetching && transfer->places.empty();
  if (!fetches || message.offset > transfer->length || payload.size() > transfer->length - message.offset ||
      !transfer->received.Add(message.offset, message.offset + payload.size())) {
    ++counts_.refused;
    return;
  }
  const std::byte* from = payload.data();
  transfer->targets.ForEach(message.offset, payload.size(), [&](std::span<std::byte> piece) {
    areas_.CopyIn(piece.data(), {from, piece.size()});
    from += piece.size();
    return true;
  });
  if (transfer->received_bytes != nullptr) transfer->received_bytes->fetch_add(payload.size());
  if (transfer->received.bytes() == transfer->length) transfers_.End(message.to.number, absl::OkStatus());
}

// Sends pieces of the connection's transfers in turn, as far as UCX may queue them.
bool Exchange::Pump(PeerConnection& connection) {
  bool some = false;
  while (!connection.lost && !connection.sending.empty() && connection.bytes_queued < kQueuedBytes) {
    const uint64_t number = connection.sending.front();
    connection.sending.erase(connection.sending.begin());
    Transfer* const found = transfers_.Find(number);
    if (found == nullptr || found->ended) continue;
    if (found->role == Transfer::Role::kFetching) {
      loans_.ReadPiece(connection, number, *found);
    } else {
      SendPiece(connection, number, *found);
    }
    some = true;
  }
  return some;
}

void Exchange::SendPiece(PeerConnection& connection, uint64_t number, Transfer& transfer) {
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
  connections_.ucx().Send(
      *connection.link, message, std::move(pieces),
      [this, link, number, bytes](const absl::Status& status) { transfers_.Moved(link, number, bytes, status); });
}

}  // namespace ashlar::daemon
