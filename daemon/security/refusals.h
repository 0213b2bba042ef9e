// SPDX-License-Identifier: Apache-2.0
// Refusals: counts and logs why other daemons were refused.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/mutex.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The reason is a metric label.
enum class Refusal : uint8_t {
  kHandshake,      // the connection ended before the greeting: no TLS, another protocol, or disconnected
  kNoCertificate,  // no certificate
  kUntrusted,      // not signed by a trusted authority
  kExpired,
  kNotYetValid,
  kBadCertificate,  // any other error of the certificate
  kNoName,          // the certificate names no node, or not in the configured form
  kNotAMember,      // the configuration does not list the node
  kWrongNode,       // differs from the claimed or the called node
  kVersion,         // no common protocol version
  kBadGreeting,     // invalid greeting, or a call without one
  kTenant,          // the tenant is unknown here or not shared with the peer
  kTooMany,         // connection limit
};
inline constexpr size_t kRefusals = static_cast<size_t>(Refusal::kTooMany) + 1;
absl::string_view Name(Refusal refusal);

// Thread-safe.
class Refusals {
 public:
  // `counted` is called for each refusal, on the refusing thread; it may be empty.
  explicit Refusals(std::function<void(Refusal)> counted = {}) : counted_(std::move(counted)) {}

  // `peer`: the peer's node name or address; the peer may have chosen the text.
  void Add(Refusal refusal, absl::string_view peer, absl::string_view detail);
  uint64_t count(Refusal refusal) const { return counts_[static_cast<size_t>(refusal)].load(); }

 private:
  // Log lines per second. Without a limit, any host that reaches the port could fill the log.
  static constexpr int kLinesASecond = 10;

  const std::function<void(Refusal)> counted_;
  std::array<std::atomic<uint64_t>, kRefusals> counts_{};
  Mutex mutex_;
  storage::Nanos second_ ABSL_GUARDED_BY(mutex_) = 0;  // start of the current second
  int lines_ ABSL_GUARDED_BY(mutex_) = 0;              // lines in the current second
  uint64_t unlogged_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ashlar::daemon
