#include "daemon/peer/channels/peer_rates.h"

#include <algorithm>
#include <cmath>

namespace ashlar::daemon {
namespace {

// Of a copy over a connection that is new, in round trips: two handshakes, the request, and TCP's window, which begins
// with ten segments and doubles with each round trip.
constexpr double kConnecting = 8, kFirstWindow = 14'000;

}  // namespace

void PeerRates::Answered(const std::string& node, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.failures = 0;
  rate.answers.Answered(took);
}

void PeerRates::Failed(const std::string& node, storage::Nanos now) {
  Rate& rate = rates_[node];
  ++rate.failures;
  ++rate.failed_calls;
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

void PeerRates::Keep(const std::set<std::string>& nodes) {
  std::erase_if(rates_, [&](const auto& each) { return each.second.under_way == 0 && !nodes.contains(each.first); });
}

void PeerRates::Came(const std::string& node, uint64_t bytes, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.bytes = kKept * rate.bytes + static_cast<double>(bytes);
  rate.nanos = kKept * rate.nanos + static_cast<double>(took);
  rate.copies.Answered(took);
}

void PeerRates::GaveUp(const std::string& node, storage::Nanos began, storage::Nanos now) {
  Rate& rate = rates_[node];
  ++rate.stalls;
  rate.copies.Unanswered(began, now);
}

PeerRates::Figures PeerRates::Of(const std::string& node) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return {};
  const Rate& rate = found->second;
  return {.bytes_per_second = rate.nanos > 0 ? rate.bytes / rate.nanos * 1e9 : 0,
          .journey = rate.answers.mean(),
          .failed_calls = rate.failed_calls,
          .stalls = rate.stalls,
          .bytes = rate.used};
}

storage::Nanos PeerRates::Estimate(const std::string& node, uint64_t bytes) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return 0;
  const Rate& rate = found->second;
  const double copy = rate.bytes > 0 ? rate.nanos / rate.bytes * static_cast<double>(bytes) : 0;
  return rate.answers.mean() + static_cast<storage::Nanos>(copy);
}

storage::Nanos PeerRates::Patience(const std::string& node, uint64_t bytes, double factor,
                                   const RoundTrips::Bounds& bounds) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return bounds.least;
  const Rate& rate = found->second;
  const double round = static_cast<double>(rate.answers.Late());
  const double all = static_cast<double>(bytes + rate.under_way);
  const double windows = std::log2(1 + all / kFirstWindow);
  const double copy = rate.bytes > 0 ? rate.nanos / rate.bytes * all : 0;
  const double usual = kConnecting * round + factor * std::max(copy, windows * round);
  return rate.copies.Limit(static_cast<storage::Nanos>(std::min(usual, static_cast<double>(bounds.most))), bounds);
}

}  // namespace ashlar::daemon
