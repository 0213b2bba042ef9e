// SPDX-License-Identifier: Apache-2.0
// Grant: the right to read or to write some bytes of another daemon, for whoever knows it.
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

// The number says which grant is meant, the secret proves the right. Grants travel over the authenticated control plane
// only. A number is never issued twice by one transport.
struct Grant {
  uint64_t number = 0;
  std::array<uint8_t, 16> secret{};
};

// Compares number and secret. The time does not depend on where the secrets differ.
bool SameGrant(const Grant& a, const Grant& b);
// Fills a secret from the kernel's random source.
std::array<uint8_t, 16> DrawSecret();

using Spans = std::vector<std::span<std::byte>>;
using ConstSpans = std::vector<std::span<const std::byte>>;

// The bytes behind a grant, at the side that owns the memory.
class GrantedBytes {
 public:
  virtual ~GrantedBytes() = default;
  // Asks where the bytes [offset, offset + length) lie, which is inside the grant. `answer` takes exactly `length`
  // bytes in order, or the error that the peer gets; call it once, from any thread, now or later (a copy may still be
  // on its way up). The spans stay valid until the transport has called what Revoke was given. Called on the
  // transport's thread: it must not wait.
  virtual void Resolve(uint64_t offset, uint64_t length, std::function<void(absl::StatusOr<Spans>)> answer) = 0;
  // A push into [offset, offset + length) has ended, on the transport's thread. Unless the status is OK, any of the
  // bytes may have changed. No byte of this push is written after the call.
  virtual void Written(uint64_t offset, uint64_t length, const absl::Status& status) = 0;
};

}  // namespace ashlar::daemon
