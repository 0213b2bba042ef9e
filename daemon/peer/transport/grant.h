// SPDX-License-Identifier: Apache-2.0
// Grant: a bearer token for the right to read some bytes of another daemon.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::daemon {

// The number identifies the grant, the secret proves the right. Grants are sent over the authenticated control plane
// only. A transport never issues a number twice.
struct Grant {
  uint64_t number = 0;
  std::array<uint8_t, 16> secret{};
};

// Compares number and secret in constant time.
bool SameGrant(const Grant& a, const Grant& b);
// Fills a secret from the kernel's random source.
std::array<uint8_t, 16> DrawSecret();

using Spans = std::vector<std::span<std::byte>>;
using ConstSpans = std::vector<std::span<const std::byte>>;

// The granted bytes at the side that owns the memory.
class GrantedBytes {
 public:
  virtual ~GrantedBytes() = default;
  // Asks for the memory of bytes [offset, offset + length) of the grant. `answer` takes spans of exactly `length` bytes
  // in order, or the error for the peer. It must be called once, from any thread, now or later (the object may still be
  // loading). The spans must stay valid until the transport calls the callback of Revoke. Called on the transport's
  // thread: it must not block.
  virtual void Resolve(uint64_t offset, uint64_t length, std::function<void(absl::StatusOr<Spans>)> answer) = 0;
};

}  // namespace ashlar::daemon
