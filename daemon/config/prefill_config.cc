// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/prefill_config.h"

#include "ashlar/v1/config.pb.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

constexpr uint32_t kMostPatience = 1000, kMostPatienceMilliseconds = 3'600'000, kMostTries = 16;
constexpr uint32_t kMostSegmentsOfANode = 48;  // limit of the 64 calls per connection between two nodes

}  // namespace

void FillPrefillDefaults(v1::Config* config) {
  v1::Prefill* prefill = config->mutable_prefill();
  if (prefill->patience() == 0) prefill->set_patience(4);
  if (prefill->min_patience_milliseconds() == 0) prefill->set_min_patience_milliseconds(2000);
  if (prefill->tries() == 0) prefill->set_tries(3);
  if (prefill->segments_per_node() == 0) prefill->set_segments_per_node(24);
}

absl::Status CheckPrefill(const v1::Config& config) {
  const v1::Prefill& prefill = config.prefill();
  if (prefill.patience() > kMostPatience)
    return Invalid("prefill.patience: out of range; expected at most ", kMostPatience);
  if (prefill.min_patience_milliseconds() > kMostPatienceMilliseconds) {
    return Invalid("prefill.min_patience_milliseconds: out of range; expected at most ", kMostPatienceMilliseconds);
  }
  if (prefill.tries() > kMostTries) return Invalid("prefill.tries: out of range; expected at most ", kMostTries);
  if (prefill.segments_per_node() > kMostSegmentsOfANode)
    return Invalid("prefill.segments_per_node: out of range; expected at most ", kMostSegmentsOfANode);
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
