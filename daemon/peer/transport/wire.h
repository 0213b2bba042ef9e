// SPDX-License-Identifier: Apache-2.0
// Wire: the header of every message between two transports. It is validated here before any other code sees it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "daemon/peer/transport/grant.h"

namespace ashlar::daemon {

enum class MessageKind : uint8_t {
  kFetch = 1,  // to: the grant; from: the ticket for the data; offset, length, patience
  // 2, 3 and 5 are reserved: earlier versions pushed with them.
  kData = 4,    // to: a ticket; offset: position of the payload in the transfer
  kFailed = 6,  // to: a ticket; code: the error code; the payload is its text
  kCancel = 7,  // from: the ticket of the cancelled request
  kPing = 8,    // requests a kPong, so that silence means a broken connection
  kPong = 9,
  kBorrow = 10,    // like kFetch, for an RDMA read by the sender; from: the ticket for the answer
  kLent = 11,      // to: the ticket of a kBorrow; from: the ticket of the loan; the bytes are there and stay
  kReturned = 12,  // to: the ticket of a loan; nothing is read there any more
};

// `to` was issued by the receiver, which checks it. `from` was issued by the sender, for the answers.
struct Message {
  MessageKind kind = MessageKind::kPing;
  uint8_t code = 0;  // absl::StatusCode
  Grant to, from;
  uint64_t offset = 0, length = 0;
  uint64_t patience = 0;  // nanoseconds that the sender waits from now
};

inline constexpr size_t kHeaderBytes = 80;
inline constexpr size_t kMaxErrorText = 256;

using HeaderBytes = std::array<std::byte, kHeaderBytes>;
HeaderBytes EncodeMessage(const Message& message);

// INVALID_ARGUMENT names the error. In an accepted message the kind is known, unused fields are 0, and offset + length
// (for kData: payload) is at most 2^63. Secrets are not checked here.
absl::StatusOr<Message> ParseMessage(std::span<const std::byte> header, size_t payload_bytes);

}  // namespace ashlar::daemon
