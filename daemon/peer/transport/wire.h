// SPDX-License-Identifier: Apache-2.0
// Wire: the header of every message between two transports. Bytes from a peer are judged here, before any other code
// sees them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "daemon/peer/transport/grant.h"

namespace ashlar::daemon {

enum class MessageKind : uint8_t {
  kFetch = 1,   // to: the grant; from: the ticket that the data shall name; offset, length, patience
  kPush = 2,    // to: the grant; from: the ticket that the answer shall name; offset, length, patience
  kReady = 3,   // to: the ticket of a kPush; from: the ticket that the data shall name
  kData = 4,    // to: a ticket; offset: of the payload in the transfer
  kDone = 5,    // to: the ticket of a kPush: all bytes are written
  kFailed = 6,  // to: a ticket; code: of the error; the payload is its text
  kCancel = 7,  // from: the ticket of a kFetch or kPush that nobody waits for any more
  kPing = 8,    // asks for a kPong, so that silence means a broken connection
  kPong = 9,
  kBorrow = 10,    // as kFetch, for a card that reads the bytes itself; from: the ticket that the answer shall name
  kLent = 11,      // to: the ticket of a kBorrow; from: the ticket of the loan. The bytes are there, and stay
  kReturned = 12,  // to: the ticket of a loan: nothing is read there any more
};

// `to` is what the receiver issued and checks; `from` is what the sender issued, for the answers.
struct Message {
  MessageKind kind = MessageKind::kPing;
  uint8_t code = 0;  // absl::StatusCode
  Grant to, from;
  uint64_t offset = 0, length = 0;
  uint64_t patience = 0;  // nanoseconds that the sender will wait from now on
};

inline constexpr size_t kHeaderBytes = 80;
inline constexpr size_t kMaxErrorText = 256;

using HeaderBytes = std::array<std::byte, kHeaderBytes>;
HeaderBytes EncodeMessage(const Message& message);

// INVALID_ARGUMENT names what is wrong. Of what is accepted: the kind is known, fields that the kind does not use are
// 0, and no sum of offset and length (of kData: payload) is more than 2^63. Secrets are not judged here.
absl::StatusOr<Message> ParseMessage(std::span<const std::byte> header, size_t payload_bytes);

}  // namespace ashlar::daemon
