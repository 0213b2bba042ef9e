// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/channels/peer_rates.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {
namespace {

// Cost of a copy over a new connection, in round trips: two handshakes, the request, and TCP's window, which starts at
// ten segments and doubles per round trip.
constexpr double kConnecting = 8, kFirstWindow = 14'000;

}  // namespace

void PeerRates::Answered(const std::string& node, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.failed = false;
  rate.answers.Answered(took);
}

void PeerRates::Failed(const std::string& node) {
  Rate& rate = rates_[node];
  rate.failed = true;
  ++rate.failed_calls;
}

bool PeerRates::MayAsk(const std::string& node) const {
  const auto found = rates_.find(node);
  return found == rates_.end() || !found->second.failed;
}

std::set<std::string> PeerRates::Failing() const {
  std::set<std::string> failing;
  for (const auto& [node, rate] : rates_) {
    if (rate.failed) failing.insert(node);
  }
  return failing;
}

void PeerRates::Keep(const std::set<std::string>& nodes) {
  std::erase_if(rates_, [&](const auto& each) { return each.second.under_way == 0 && !nodes.contains(each.first); });
}

void PeerRates::Begins(const std::string& node, uint64_t bytes, storage::Nanos now) {
  Rate& rate = rates_[node];
  if (rate.under_way == 0) {
    if (now - rate.measured_at > kFresh) {
      rate.link_bytes = rate.link_nanos = rate.measured_nanos = 0;
      rate.link_known = false;
    }
    rate.measured_at = now;
  }
  rate.under_way += bytes;
}

void PeerRates::Ends(const std::string& node, uint64_t bytes, storage::Nanos now) {
  Moved(node, 0, now);
  rates_[node].under_way -= bytes;
}

void PeerRates::Moved(const std::string& node, uint64_t bytes, storage::Nanos now) {
  Rate& rate = rates_[node];
  rate.link_bytes += static_cast<double>(bytes);
  const auto took = static_cast<double>(now - std::exchange(rate.measured_at, now));
  rate.link_nanos += took;
  rate.measured_nanos += took;
  const double kept = std::min({1.0, kLinkBytes / std::max(rate.link_bytes, 1.0), kLinkNanos / rate.link_nanos});
  // Connection setup and TCP's first windows say nothing about the link.
  const double windows = std::log2(1 + static_cast<double>(rate.under_way) / kFirstWindow);
  const double least = kLeastNanos + (kConnecting + windows) * static_cast<double>(rate.answers.Late());
  rate.link_known |= rate.link_bytes >= kLinkBytes / 4 || rate.measured_nanos >= least;
  rate.link_bytes *= kept;
  rate.link_nanos *= kept;
}

storage::Nanos PeerRates::Transfer(const std::string& node, uint64_t bytes, storage::Nanos now) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return 0;
  const Rate& rate = found->second;
  if (rate.under_way == 0 && now - rate.measured_at > kFresh) return 0;
  if (!rate.link_known) return 0;
  const double best = rate.link_bytes + static_cast<double>(Transport::kMessageBytes);
  const double time = static_cast<double>(bytes) * rate.link_nanos / best;
  return std::max<storage::Nanos>(1, static_cast<storage::Nanos>(time));
}

void PeerRates::Came(const std::string& node, uint64_t bytes, storage::Nanos took) {
  Rate& rate = rates_[node];
  rate.bytes = kKept * rate.bytes + static_cast<double>(bytes);
  rate.nanos = kKept * rate.nanos + static_cast<double>(took);
  rate.copies.Answered(took);
}

void PeerRates::Abandoned(const std::string& node, storage::Nanos began, storage::Nanos now) {
  Rate& rate = rates_[node];
  ++rate.stalls;
  rate.copies.Unanswered(began, now);
}

PeerRates::Figures PeerRates::Of(const std::string& node) const {
  const auto found = rates_.find(node);
  if (found == rates_.end()) return {};
  const Rate& rate = found->second;
  return {.bytes_per_second = rate.nanos > 0 ? rate.bytes / rate.nanos * 1e9 : 0,
          .rtt = rate.answers.mean(),
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
