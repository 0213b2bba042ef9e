// SPDX-License-Identifier: Apache-2.0
// Refusals: why other daemons were refused, counted by reason and logged.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "absl/strings/string_view.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The reason is a metric's label.
enum class Refusal : uint8_t {
  kHandshake,      // its connection ended before it said anything: no TLS, another protocol, or it went away
  kNoCertificate,  // it showed none
  kUntrusted,      // none of the authorities here signed it
  kExpired,
  kNotYetValid,
  kBadCertificate,  // anything else that is wrong with it
  kNoName,          // it names no node, or not in the form that the configuration asks for
  kNotAMember,      // the configuration does not list the node
  kWrongNode,       // another node than it says it is, or than was called
  kVersion,         // no version of the protocol in common
  kBadGreeting,     // a field of its greeting is wrong, or it made calls without one
  kTenant,          // it asked for a tenant that is unknown here or not shared with it
  kTooMany,         // bounded connections
};
inline constexpr size_t kRefusals = static_cast<size_t>(Refusal::kTooMany) + 1;
absl::string_view Name(Refusal refusal);

// Thread-safe.
class Refusals {
 public:
  // `counted` is told of each refusal, on the thread that refuses; it may be empty.
  explicit Refusals(std::function<void(Refusal)> counted = {}) : counted_(std::move(counted)) {}

  // `who`: what is known of the peer, its node's name or address. It may be the peer's own text.
  void Add(Refusal refusal, absl::string_view who, absl::string_view why);
  uint64_t count(Refusal refusal) const { return counts_[static_cast<size_t>(refusal)].load(); }

 private:
  // So many lines a second: whoever reaches the port could fill the log otherwise.
  static constexpr int kLinesASecond = 10;

  const std::function<void(Refusal)> counted_;
  std::array<std::atomic<uint64_t>, kRefusals> counts_{};
  std::mutex mutex_;
  storage::Nanos second_ = 0;  // when the present one began; guarded by mutex_, as below
  int lines_ = 0;              // in it
  uint64_t unlogged_ = 0;
};

}  // namespace ashlar::daemon
