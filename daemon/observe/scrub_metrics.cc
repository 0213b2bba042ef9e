// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/scrub_metrics.h"

#include <chrono>
#include <string>

#include "daemon/observe/follow.h"

namespace ashlar::daemon {

ScrubMetrics::ScrubMetrics(prometheus::Registry& registry)
    : passes_(prometheus::BuildCounter()
                  .Name("ashlar_scrub_passes_total")
                  .Help("Completed passes over all copies")
                  .Register(registry)
                  .Add({})),
      last_(prometheus::BuildGauge()
                .Name("ashlar_scrub_last_pass_timestamp_seconds")
                .Help("Unix time when the last pass over all copies ended; 0: none has")
                .Register(registry)
                .Add({})),
      took_(prometheus::BuildGauge()
                .Name("ashlar_scrub_last_pass_duration_seconds")
                .Help("Duration of the last pass over all copies")
                .Register(registry)
                .Add({})) {
  auto& bytes = prometheus::BuildCounter()
                    .Name("ashlar_scrub_bytes_total")
                    .Help("Bytes of copies whose checksums were verified")
                    .Register(registry);
  auto& damaged = prometheus::BuildCounter()
                      .Name("ashlar_scrub_corrupt_copies_total")
                      .Help("Corrupt or unreadable copies found and dropped")
                      .Register(registry);
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kSsd}) {
    const prometheus::Labels label = {{"tier", std::string(Name(tier))}};
    tiers_[tier] = {&bytes.Add(label), &damaged.Add(label)};
  }
}

void ScrubMetrics::Set(const storage::Scrubber::Totals& totals) {
  for (const auto& [tier, of_tier] : tiers_) {
    Follow(*of_tier.bytes, totals.bytes.at(static_cast<size_t>(tier)));
    Follow(*of_tier.damaged, totals.damaged.at(static_cast<size_t>(tier)));
  }
  if (static_cast<double>(totals.passes) == passes_.Value()) return;
  Follow(passes_, totals.passes);
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  last_.Set(now.count());
  took_.Set(static_cast<double>(totals.last_took) * 1e-9);
}

}  // namespace ashlar::daemon
