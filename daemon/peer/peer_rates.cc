#include "daemon/peer/peer_rates.h"

#include <algorithm>

namespace ashlar::daemon {

void PeerRates::Answered(const std::string& node, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.failures = 0;
  rate.answers = kKept * rate.answers + 1;
  rate.answer_nanos = kKept * rate.answer_nanos + static_cast<double>(took);
}

void PeerRates::Failed(const std::string& node, storage::Nanos now) {
  Rate& rate = rates_[node];
  ++rate.failures;
  rate.failed_at = now;
}

bool PeerRates::MayAsk(const std::string& node, storage::Nanos now) const {
  constexpr storage::Nanos kFirstPause = 250'000'000;
  constexpr uint32_t kMostDoublings = 6;
  const auto found = rates_.find(node);
  if (found == rates_.end() || found->second.failures == 0) return true;
  const uint32_t doublings = std::min(found->second.failures - 1, kMostDoublings);
  return now - found->second.failed_at >= kFirstPause << doublings;
}

uint32_t PeerRates::failures(const std::string& node) const {
  const auto found = rates_.find(node);
  return found == rates_.end() ? 0 : found->second.failures;
}

void PeerRates::Came(const std::string& node, uint64_t bytes, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.bytes = kKept * rate.bytes + static_cast<double>(bytes);
  rate.nanos = kKept * rate.nanos + static_cast<double>(took);
}

storage::Nanos PeerRates::Estimate(const std::string& node, uint64_t bytes) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return 0;
  const Rate& rate = found->second;
  const double answer = rate.answers > 0 ? rate.answer_nanos / rate.answers : 0;
  const double copy = rate.bytes > 0 ? rate.nanos / rate.bytes * static_cast<double>(bytes) : 0;
  return static_cast<storage::Nanos>(answer + copy);
}

}  // namespace ashlar::daemon
