// SPDX-License-Identifier: Apache-2.0
// MissingRuns: a prompt's misses that this engine computes and publishes, or that other engines compute for it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/prompt_text.h"
#include "client/engine/publish_runs.h"
#include "client/session/model.h"
#include "client/session/prefill.h"
#include "proto/outcome.h"

namespace ashlar::engine {

// A run is published or abandoned through its index in runs().
class MissingRuns {
 public:
  // `cancelled`: set by any thread; ends waits.
  MissingRuns(CacheState& cache, const PromptText& text, const std::atomic<bool>& cancelled)
      : cache_(cache), text_(text), cancelled_(cancelled) {}
  ~MissingRuns();
  MissingRuns(const MissingRuns&) = delete;
  MissingRuns& operator=(const MissingRuns&) = delete;

  enum class Reserved : uint8_t {
    kNothing,  // nothing to fill, or other engines are faster
    kRuns,     // runs(), or segments that other engines compute
    kPresent,  // a lookup finds a segment that was published meanwhile
  };
  // Reserves the missed segments that a publish would fix, except those that other engines compute if `cold_parallel`.
  Reserved Reserve(std::span<const MissReason> reasons, bool cold_parallel);
  // Takes the whole text as a run to compute for another engine. Without a reservation, another process publishes it.
  void TakeWork(const PrefillWork& work, const Reservation& reservation);
  // After PromptText::OwnTokens: the runs' tokens were at `from`.
  void MoveTokens(const int32_t* from);

  std::span<const Run> runs() const { return runs_; }
  // The number of segments that other engines compute, at first.
  uint32_t computed_elsewhere() const { return static_cast<uint32_t>(elsewhere_); }
  // Waits for these. kRestart: runs() has more. kPending: not over yet.
  Status WaitCold(std::chrono::milliseconds timeout);
  // Waits in parts, so that the request's end stops the wait.
  Status WaitColdUntil(std::chrono::steady_clock::time_point until);

  // `index` names the run among others: "[2]".
  Status Check(uint32_t run, const ComputedRun& computed, const std::string& index) const;
  // Takes out a checked run.
  TakenRun TakeOut(uint32_t run);
  void Abandon(uint32_t run);
  // Another engine asked for the run, and another process of this engine has published it.
  Status MarkPublished(uint32_t run);
  // Abandons all runs. Does not wait for the daemon.
  void AbandonAll();
  void EndPrefill();  // the daemon need not keep what other engines have computed

 private:
  // Returns the number of granted runs. `present`: one is in the cache by now.
  size_t ReserveRuns(const std::vector<Run>& runs, const std::vector<ObjectRun>& objects, bool* present);

  CacheState& cache_;
  const PromptText& text_;
  const std::atomic<bool>& cancelled_;
  std::vector<Run> runs_;
  std::vector<Reservation> reservations_;  // one per run; not granted: published or abandoned
  PrefillPlan prefill_;                    // segments that other engines compute
  std::vector<Run> cold_;                  // one run per state of prefill_
  size_t elsewhere_ = 0;
  std::optional<PrefillResult> work_;  // result for another engine, not reported yet
};

}  // namespace ashlar::engine
