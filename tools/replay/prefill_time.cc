// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/prefill_time.h"

#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ashlar::replay {

PrefillTime::PrefillTime(const Model& model) : costs_(model.costs), flops_per_second_(model.flops_per_second) {}

absl::StatusOr<PrefillTime> PrefillTime::Parse(const std::vector<std::string>& table) {
  PrefillTime time;
  for (const std::string& row : table) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(row, absl::MaxSplits(':', 1));
    uint64_t tokens = 0;
    double rate = 0;
    if (!absl::SimpleAtoi(parts.first, &tokens) || tokens == 0 || !absl::SimpleAtod(parts.second, &rate) ||
        !(rate > 0 && rate < 1e12)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--prefill-rate: ", row, " is invalid; expected TOKENS:RATE, both positive, for example 1024:20000"));
    }
    time.rates_[tokens] = rate;
  }
  double before = 0;
  for (const auto& [tokens, rate] : time.rates_) {
    const double seconds = static_cast<double>(tokens) / rate;
    if (seconds <= before) {
      return absl::InvalidArgumentError(
          absl::StrCat("--prefill-rate: ", tokens, " tokens take less time than fewer tokens; expected more"));
    }
    before = seconds;
  }
  return time;
}

double PrefillTime::Seconds(uint64_t tokens) const {
  if (rates_.empty()) return costs_.Flops(tokens) / flops_per_second_;
  const auto length = static_cast<double>(tokens);
  const auto after = rates_.lower_bound(tokens);
  if (after == rates_.begin()) return length / after->second;
  const auto before = std::prev(after);
  if (after == rates_.end()) return length / before->second;
  // Linear in time, so that it always ascends.
  const auto low = static_cast<double>(before->first), high = static_cast<double>(after->first);
  const double share = (length - low) / (high - low);
  return (1 - share) * low / before->second + share * high / after->second;
}

}  // namespace ashlar::replay
