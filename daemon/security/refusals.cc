// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/refusals.h"

#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {

absl::string_view Name(Refusal refusal) {
  switch (refusal) {
    case Refusal::kHandshake:
      return "handshake";
    case Refusal::kNoCertificate:
      return "no_certificate";
    case Refusal::kUntrusted:
      return "untrusted";
    case Refusal::kExpired:
      return "expired";
    case Refusal::kNotYetValid:
      return "not_yet_valid";
    case Refusal::kBadCertificate:
      return "bad_certificate";
    case Refusal::kNoName:
      return "no_name";
    case Refusal::kNotAMember:
      return "not_a_member";
    case Refusal::kWrongNode:
      return "wrong_node";
    case Refusal::kVersion:
      return "version";
    case Refusal::kBadGreeting:
      return "bad_greeting";
    case Refusal::kTenant:
      return "tenant";
    case Refusal::kTooMany:
      return "too_many";
  }
  return "unknown";
}

void Refusals::Add(Refusal refusal, absl::string_view peer, absl::string_view detail) {
  counts_[static_cast<size_t>(refusal)].fetch_add(1);
  if (counted_) counted_(refusal);
  uint64_t unlogged = 0;
  {
    MutexLock lock(mutex_);
    constexpr storage::Nanos kSecond = 1'000'000'000;
    const storage::Nanos now = MonotonicClock().Now();
    if (now - second_ >= kSecond) {
      second_ = now;
      lines_ = 0;
    }
    if (lines_ == kLinesASecond) {
      ++unlogged_;
      return;
    }
    ++lines_;
    std::swap(unlogged, unlogged_);
  }
  Log(LogLevel::kWarning, "peer refused",
      {{"reason", Name(refusal)}, {"peer", peer}, {"detail", detail}, {"not_logged_before", unlogged}});
}

}  // namespace ashlar::daemon
