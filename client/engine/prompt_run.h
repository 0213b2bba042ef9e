// SPDX-License-Identifier: Apache-2.0
// PromptRun, the implementation behind Request: one prompt, from its lookup to the verdict of its landing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/leased_match.h"
#include "client/engine/missing_runs.h"
#include "client/engine/page_tables.h"
#include "client/engine/plan_advance.h"
#include "client/engine/plan_landing.h"
#include "client/engine/prompt_text.h"
#include "client/engine/request_pages.h"
#include "client/engine/request_plan.h"

namespace ashlar::engine {

// Used by one thread at a time: the engine's or, between a Start and its end, a background thread. Its parts are in the
// order in which a request uses them, and each knows only the parts before it.
class PromptRun {
 public:
  explicit PromptRun(CacheState& cache) : cache_(cache) {}
  PromptRun(const PromptRun&) = delete;
  PromptRun& operator=(const PromptRun&) = delete;

  // Check and take the arguments of a call; `field` names them in errors. Do not ask the daemon.
  Status Take(const Prompt& prompt, const std::string& field);
  Status Take(const PlanToLand& plan, const std::string& field);
  // Takes a segment to compute for another engine, and its reservation. Looks nothing up.
  void Take(PrefillWork work, const Reservation& reservation);
  // Keeps a copy of the prompt's tokens: the caller's may go before they are read.
  void OwnTokens();

  // Ask the daemon and wait: Begin for several prompts together, Attach for a plan.
  static void Begin(CacheState& cache, std::span<const std::shared_ptr<PromptRun>> prompt_runs);
  void Attach();
  // For LookAgain, which may use the same pages or others.
  Status TakeOtherPages(const GivenPages& given);
  void LookAgain();
  // Makes every segment a miss, without asking the daemon.
  void Miss(MissReason reason);
  // Marks that the engine knows the plan: if nothing lands, it owns the pages again. Called on the engine's thread, so
  // that an engine that ends a request before it has seen the plan gets the pages back as quiesced ones.
  void PlanIsKnown();

  Status Move(const GivenPages& given);
  Status DropSegments(std::span<const uint32_t> segments);
  // On any thread: sends no further calls, and starts no further landings.
  void MarkCancelled() { cancelled_ = true; }
  void Cancel();
  // kOk: nothing can write to the pages any longer, and they belong to the engine.
  Status Quiesced();

  CacheState& cache() { return cache_; }
  const PromptText& text() const { return text_; }
  LeasedMatch& match() { return match_; }
  const RequestPlan& plan() const { return plan_; }
  const RequestPages& pages() const { return pages_; }
  PlanLanding& landing() { return landing_; }
  MissingRuns& missing() { return missing_; }
  PlanAdvance& advance() { return advance_; }

 private:
  // Takes pages to land in.
  Status TakePages(const GivenPages& given, const std::string& field);
  // Looks the prompt up and lands all hits, in one call if possible.
  void LookUp();
  // Takes the match and lands all of its hits.
  void LandMatch(ashlar::Match match);
  void Land(std::vector<LandSegment> wanted);
  LandSegment AtItsPlace(uint32_t segment) const;
  void ReserveMissing();

  CacheState& cache_;
  std::atomic<bool> cancelled_ = false;
  bool fill_ = false, cold_parallel_ = false, store_only_ = false;
  PromptText text_;
  LeasedMatch match_;
  RequestPlan plan_{cache_, text_, match_};
  RequestPages pages_{cache_};
  PlanLanding landing_{cache_, text_, match_, plan_, pages_};
  MissingRuns missing_{cache_, text_, cancelled_};
  PlanAdvance advance_{cache_, text_, match_, plan_, landing_};
};

}  // namespace ashlar::engine
