// SPDX-License-Identifier: Apache-2.0
// PublishRuns: publishes runs that the engine has computed, in as few calls as possible.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/session/model.h"
#include "client/session/prefill.h"
#include "proto/key.h"
#include "proto/outcome.h"

namespace ashlar::engine {

// A run that one call publishes or abandons, and no other call.
struct TakenRun {
  Run run;
  Reservation reservation;
  std::optional<PrefillResult> work;  // work for another engine
  // The run's text, to make the reservation again if it has ended.
  std::vector<int32_t> tokens;
  std::vector<MediaHash> media;
  Salt salt;
};

// Returns one outcome for each. Any thread.
std::vector<PublishOutcome> PublishRuns(CacheState& cache, std::span<const TakenRun> taken,
                                        std::span<const ComputedRun> computed);

// Abandons the taken runs. Any thread.
void AbandonRuns(CacheState& cache, std::span<const TakenRun> taken);

}  // namespace ashlar::engine
