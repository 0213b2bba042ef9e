// SPDX-License-Identifier: Apache-2.0
// Loans: a reader borrows bytes of a holder, fetches them by RDMA reads, and returns the loan.
#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/exchange.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kReadBytes = 1024 * 1024;  // per read

}  // namespace

void Exchange::Register(std::byte* data, uint64_t bytes, MemoryType type, Transport::CopyIn copy_in) {
  if (copy_in && ucx_->Reaches(type)) far_areas_[data] = {bytes, std::move(copy_in)};
  const absl::StatusOr<std::string> key = ucx_->Reaches(type)
                                              ? ucx_->Register(data, bytes, type)
                                              : absl::UnimplementedError("UCX cannot access this type of memory");
  if (!key.ok()) {
    Log("not registered", absl::StrCat(bytes, " bytes"), std::string(key.status().message()));
  } else if (!key->empty()) {
    areas_.Add(data, bytes, *key);
  }
}

const Transport::CopyIn* Exchange::WayInto(const std::byte* data) const {
  const auto next = far_areas_.upper_bound(data);
  if (next == far_areas_.begin()) return nullptr;
  const auto& [begin, area] = *std::prev(next);
  return data < begin + area.bytes ? &area.copy_in : nullptr;
}

// The receiving thread copies the bytes of messages.
absl::Status Exchange::MayMove(const Transfer& transfer) const {
  if (!transfer.places.empty()) return absl::OkStatus();
  bool may = true;
  transfer.targets.ForEach(0, transfer.targets.bytes(), [&](std::span<std::byte> piece) {
    may = ucx_->TypeOf(piece.data()) == MemoryType::kHost || WayInto(piece.data()) != nullptr;
    return may;
  });
  return may ? absl::OkStatus() : absl::FailedPreconditionError("this memory can only be filled by RDMA reads");
}

// The first requests over a new connection use messages, because its transport is not known yet.
bool Exchange::Borrows(const Connection& connection, const Transfer& transfer) const {
  return connection.reads && transfer.role == Role::kFetching && transfer.offset <= transfer.places.bytes() &&
         transfer.length <= transfer.places.bytes() - transfer.offset;
}

void Exchange::Lend(Transfer& transfer) {
  transfer.lent = true;
  transfer.sends = 1;
  ucx_->SendText(*transfer.link, {.kind = MessageKind::kLent, .to = transfer.theirs, .from = transfer.ticket}, "");
}

void Exchange::Lent(Connection& connection, const Message& message) {
  Transfer* const transfer = OurTicket(connection, message.to);
  if (transfer == nullptr || transfer->places.empty() || transfer->lent) {  // no caller waits for it any more
    ucx_->SendText(*connection.link, {.kind = MessageKind::kReturned, .to = message.from}, "");
    return;
  }
  transfer->lent = true;
  transfer->theirs = message.from;
  for (const RemoteArena& arena : transfer->places.memory().arenas) {
    absl::StatusOr<std::unique_ptr<RemoteKey>> key = ucx_->Unpack(*connection.link, arena.key);
    if (!key.ok()) {
      End(message.to.number, key.status());
      return;
    }
    transfer->keys.push_back(*std::move(key));
  }
  connection.sending.push_back(message.to.number);
}

// Reads bytes that are contiguous at both ends.
void Exchange::ReadPiece(Connection& connection, uint64_t number, Transfer& transfer) {
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
  ucx_->Get(*connection.link, *transfer.keys[there.arena], there.address, here,
            [this, link, number, bytes](const absl::Status& status) {
              if (status.ok()) counts_.read_bytes += bytes;
              Moved(link, number, bytes, status);
            });
}

void Exchange::Returned(const Connection& connection, const Message& message) {
  const auto found = transfers_.find(message.to.number);  // it may have ended; then waits for it
  const bool valid = found != transfers_.end() && found->second->link == connection.link &&
                     found->second->role == Role::kLending && SameGrant(found->second->ticket, message.to);
  if (!valid || !found->second->lent) {
    ++counts_.late;
    return;
  }
  if (!found->second->ended) connection.link->bytes_sent += found->second->length;
  GiveBack(message.to.number);
}

void Exchange::GiveBack(uint64_t number) {
  Transfer& transfer = *transfers_.at(number);
  transfer.lent = false;
  transfer.sends = 0;
  if (!transfer.ended) {
    End(number, absl::OkStatus());
    return;
  }
  --recalled_;
  Finish(number);
}

void Exchange::GiveBackAll(const Connection& connection) {
  const std::set<uint64_t> under_way = connection.transfers;
  for (const uint64_t number : under_way) {
    const auto found = transfers_.find(number);
    if (found != transfers_.end() && found->second->role == Role::kLending && found->second->lent) GiveBack(number);
  }
}

bool Exchange::KeepsLoan(const Connection& connection, int64_t now) const {
  if (recalled_ == 0) return false;
  return std::ranges::any_of(connection.transfers, [&](uint64_t number) {
    const Transfer& transfer = *transfers_.at(number);
    return transfer.role == Role::kLending && transfer.lent && transfer.ended &&
           now - transfer.ended_at > options_.silence;
  });
}

}  // namespace ashlar::daemon
