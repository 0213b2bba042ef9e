// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/transfers.h"

#include <algorithm>
#include <string>

#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {

Transfer& Transfers::Add(uint64_t number, std::unique_ptr<Transfer> transfer) {
  deadlines_.emplace(transfer->deadline, number);
  std::unique_ptr<Transfer>& added = transfers_[number];
  added = std::move(transfer);
  return *added;
}

Transfer* Transfers::Find(uint64_t number) const {
  const auto found = transfers_.find(number);
  return found == transfers_.end() ? nullptr : found->second.get();
}

Transfer* Transfers::OfTicket(const PeerConnection& connection, const Grant& ticket) {
  Transfer* const found = Find(ticket.number);
  const bool valid =
      found != nullptr && found->link == connection.link && SameGrant(found->ticket, ticket) && !found->ended;
  if (!valid) ++counts_.late;
  return valid ? found : nullptr;
}

void Transfers::End(uint64_t number, const absl::Status& status) {
  Transfer& transfer = *transfers_.at(number);
  if (transfer.ended) return;
  transfer.ended = true;
  transfer.ended_at = surroundings_.now();
  transfer.outcome = status;
  if (transfer.role == Transfer::Role::kLending && transfer.lent) ++recalled_;
  deadlines_.erase({transfer.deadline, number});
  const PeerConnection* const connection = transfer.link == nullptr ? nullptr : connections_.Of(*transfer.link);
  if (!status.ok() && connection != nullptr && !connection->lost && !closing_) {
    if (transfer.peer != nullptr) {
      connections_.ucx().SendText(*transfer.link, {.kind = MessageKind::kCancel, .from = transfer.ticket}, "");
    } else {
      Refuse(*connection, transfer.theirs, status);
    }
  }
  if (transfer.sends == 0) Finish(number);
}

void Transfers::EndEach(const std::set<uint64_t>& numbers, const absl::Status& status) {
  const std::set<uint64_t> under_way = numbers;
  for (const uint64_t number : under_way) {
    if (transfers_.contains(number)) End(number, status);
  }
}

void Transfers::Close() {
  closing_ = true;
  std::vector<uint64_t> numbers;
  for (const auto& [number, transfer] : transfers_) numbers.push_back(number);
  for (const uint64_t number : numbers) End(number, absl::CancelledError("the transport is closing"));
}

void Transfers::Finish(uint64_t number) {
  const auto found = transfers_.find(number);
  const std::unique_ptr<Transfer> transfer = std::move(found->second);
  transfers_.erase(found);
  if (transfer->link != nullptr) {
    if (PeerConnection* const connection = connections_.Of(*transfer->link)) {
      if (transfer->role == Transfer::Role::kFetching && transfer->lent && !connection->lost && !closing_) {
        connections_.ucx().SendText(*transfer->link, {.kind = MessageKind::kReturned, .to = transfer->theirs}, "");
      }
      connection->transfers.erase(number);
      if (transfer->allowed != nullptr) connection->asked.erase(transfer->theirs.number);
      std::erase(connection->sending, number);
    }
  }
  const bool well = transfer->outcome.ok();
  if (transfer->peer != nullptr) {
    peers_.End(*transfer->peer, number, transfer->length);
    ++(well ? counts_.fetched : counts_.failed);
    transfer->done(transfer->outcome);
    return;
  }
  if (well) ++counts_.served;
  transfer->allowed->transfers.erase(number);
}

void Transfers::Expire(int64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    End(deadlines_.begin()->second, absl::DeadlineExceededError("the transfer exceeded its deadline"));
  }
}

void Transfers::Moved(uint64_t link, uint64_t number, uint64_t bytes, const absl::Status& status) {
  if (PeerConnection* const connection = connections_.Find(link)) connection->bytes_queued -= bytes;
  Transfer& transfer = *transfers_.at(number);  // exists while a send reads its sources
  --transfer.sends;
  if (status.ok() && transfer.received_bytes != nullptr) transfer.received_bytes->fetch_add(bytes);
  if (transfer.ended) {
    if (transfer.sends == 0) Finish(number);
  } else if (!status.ok()) {
    End(number, status);
  } else if (transfer.sends == 0 && transfer.sent == transfer.length) {
    End(number, absl::OkStatus());  // the last byte was handed to the network or received
  }
}

void Transfers::Return(uint64_t number) {
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

void Transfers::Refuse(const PeerConnection& connection, const Grant& to, const absl::Status& why) {
  connections_.ucx().SendText(*connection.link,
                              {.kind = MessageKind::kFailed, .code = static_cast<uint8_t>(why.raw_code()), .to = to},
                              std::string(why.message().substr(0, kMaxErrorText)));
}

void Transfers::AddTo(TransportStats& stats) const {
  stats.transfers = transfers_.size();
  stats.loans = static_cast<uint64_t>(std::ranges::count_if(
      transfers_, [](const auto& each) { return each.second->role == Transfer::Role::kLending && each.second->lent; }));
}

}  // namespace ashlar::daemon
