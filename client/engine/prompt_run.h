// SPDX-License-Identifier: Apache-2.0
// PromptRun, the implementation behind Request: one prompt being set, from its look-up to the verdict.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/background.h"
#include "client/engine/cache_state.h"
#include "client/engine/chain.h"
#include "client/engine/in_place_pages.h"
#include "client/engine/page_tables.h"
#include "client/engine/plan_bytes.h"
#include "client/session/client.h"
#include "client/session/process_bound.h"
#include "kernels/kernels.h"
#include "kernels/mutex.h"

namespace ashlar::engine {

// Used by one thread at a time: the engine's or, between a Start and its end, a background thread.
class PromptRun {
 public:
  explicit PromptRun(CacheState& cache) : cache_(cache) {}
  ~PromptRun();  // does not wait
  PromptRun(const PromptRun&) = delete;
  PromptRun& operator=(const PromptRun&) = delete;

  // Read the arguments; `field` names them. Nothing is asked of the daemon yet.
  Status Take(const Prompt& prompt, const std::string& field);
  Status Take(const PlanToLand& plan, const std::string& field);
  // A segment to compute for another engine, and its reservation; nothing is looked up.
  void Take(PrefillWork work, const Reservation& reservation);
  // Ask the daemon, and wait: Begin for several prompts together, Attach for a plan.
  static void Begin(CacheState& cache, std::span<const std::shared_ptr<PromptRun>> prompt_runs);
  void Attach();
  // For LookAgain, which may take the same pages or others.
  Status TakeOtherPages(const GivenPages& given);
  void LookAgain();
  // Makes every segment a miss, without asking the daemon.
  void Miss(MissReason reason);
  // Keeps a copy of the prompt's tokens: the caller's may go before they are read.
  void OwnTokens();
  // Any thread: what is still to be asked is not, and nothing lands any more that has not begun.
  void MarkCancelled() { cancelled_ = true; }

  CacheState& cache() { return cache_; }
  const Plan& plan() const { return plan_; }
  const ashlar::Match* match() const { return match_.has_value() ? &*match_ : nullptr; }
  std::string PlanBytes() const;

  // Filling (prompt_run_fill.cc).
  std::span<const Run> missing() const { return runs_; }
  // `index` names it among others: "[2]".
  Status Check(uint32_t missing, const ComputedRun& computed, const std::string& index) const;
  // One that has been checked, and which nothing else publishes or gives up from now on.
  struct Taken {
    Run run;
    Reservation reservation;
    std::optional<PrefillResult> work;  // for another engine
    // The run's text, for a reservation that has to be made again.
    std::vector<int32_t> tokens;
    std::vector<MediaHash> media;
    Salt salt;
    ObjectRun Text() const;
  };
  Taken TakeOut(uint32_t missing);
  void Abandon(uint32_t missing);
  uint32_t elsewhere() const { return static_cast<uint32_t>(elsewhere_); }
  Status WaitCold(std::chrono::milliseconds timeout);
  // The same in parts, so that the request's end ends it.
  Status WaitColdUntil(std::chrono::steady_clock::time_point until);

  // In-place sharing (prompt_run_land.cc).
  Status Admit(uint32_t own_pages, PageShortage* lacks);
  const AdmittedPages& admitted() const;

  // Landing (prompt_run_land.cc). `wait`: up to the cache's patience; without, kPending says that it is not over.
  Status ReachLayer(uint32_t layer, bool wait);
  Status Finish(bool wait);
  Status Move(const GivenPages& given);
  Status Lose(std::span<const uint32_t> segments);
  void Cancel();
  // kOk: nothing can write into the pages any more, and they are the engine's.
  Status Quiet();
  bool pages_kept() const { return owner_ == Owner::kCache; }
  // The engine learns the plan: if nothing lands, the pages are its own again. Called on the engine's thread, so that
  // an engine which ends a request before it has seen the plan gets the pages as quiet ones.
  void PlanIsKnown();
  // The lease ends with the last commit under way.
  void Release();

  // Of the prompt; nothing where the request was not begun with one.
  std::optional<Salt> salt() const { return begun_ ? std::optional(salt_) : std::nullopt; }

  // Committing. Whether what was computed by a finished plan is exact; nothing where it is not finished.
  std::optional<bool> exact() const { return exact_; }
  void BeginCommit();
  void EndCommit();  // any thread

  // Computing (prompt_run_advance.cc).
  struct StepView {
    kernels::TupleView tuple;
    const void* conv_tail = nullptr;
  };
  // The view of a step that is not computed, in a linear layer; for a rebuilt prefix only after ReachLayer.
  // kFailedPrecondition: released.
  Status View(uint32_t step, uint32_t layer, StepView* out);
  Status GetTuple(uint32_t step, uint32_t layer, Tuple* out);
  Status Advance(const LayerAdvance& advance);

 private:
  using Clock = std::chrono::steady_clock;

  // A prefix's state and tail in one layer, rebuilt from its span.
  struct Rebuilt {
    std::vector<float> state;
    std::vector<kernels::HeadTuple> heads;
    std::vector<std::byte> conv_tail;
  };

  // The owner of the request's pages.
  enum class Owner : uint8_t { kNobody, kDaemon, kEngine, kCache };

  Status TakeShifts(const int64_t* shifts, uint64_t count, const std::string& field);
  LandSegment AtItsPlace(uint32_t segment) const;
  Status TakePages(const GivenPages& given, const std::string& field, Owner owner);
  bool LandsAtOnce() const;
  ashlar::Prompt Asked() const;
  void LookupAndLand();
  void MissUnasked();
  void TakeMatch(ashlar::Match match);
  std::vector<LandSegment> AllHits() const;
  void LandHits(std::vector<LandSegment> wanted);
  void Use(uint32_t segment, bool used);
  void UseNothing();
  bool AnyUsed() const;
  void MakePlan();

  void ReserveMissing();
  size_t Reserve(const std::vector<Run>& runs, const std::vector<ObjectRun>& objects, bool* there);
  void EndPrefill();
  // Copies the cached prefix's state of an opaque layer.
  Status Restore(const LayerAdvance& advance, const OpaqueLayer& layer);
  // Waits for the landing; then its pages are the engine's again, or in quarantine.
  void EndLanding(std::chrono::milliseconds patience);
  void KeepPages();
  void AbandonAll();

  std::vector<uint32_t> UsedSegments() const;
  InPlacePages::State FillShared();
  Status ReachShared(bool wait);
  void LoseUnfilled();
  Status AbandonPlan();
  Status CheckPages() const;
  Status ReachLanded(uint32_t layer, bool wait);
  void StartLanding(ashlar::Landing landing);
  void TakeVerdict(const std::vector<MissReason>& verdict);
  kernels::Queue& queue();
  const Rebuilt& RebuiltPrefix(uint32_t layer, const MappedTuple& checkpoint);

  CacheState& cache_;
  // The arguments of the request.
  std::span<const int32_t> tokens_;  // empty of a plan
  uint64_t token_count_ = 0;
  std::vector<uint64_t> lengths_;
  std::vector<int64_t> rotary_shifts_;  // one per segment
  GroupedPages pages_;
  std::vector<int32_t> own_tokens_;
  std::vector<MediaHash> media_;
  Salt salt_;
  ConversationId conversation_{};
  std::chrono::nanoseconds needed_in_{0};
  bool begun_ = false, fill_ = false, cold_parallel_ = false, store_only_ = false;
  std::optional<PlannedLanding> planned_;
  uint64_t present_tokens_ = 0;

  // The hits, and their state.
  std::optional<ashlar::Match> match_;
  std::optional<ashlar::Landing> landing_;
  std::vector<LandSegment> wanted_;
  std::vector<bool> used_;  // segments that the plan takes from the cache
  bool prefix_used_ = false;
  std::vector<uint64_t> captures_;
  std::vector<MissReason> reasons_;  // one per segment
  bool gave_up_ = false;             // the plan was abandoned, or is not the one that was requested
  bool compose_here_ = false;        // the daemon has failed to
  Owner owner_ = Owner::kNobody;
  std::shared_ptr<Quarantine::Doubt> doubt_;  // of pages that the cache keeps
  std::atomic<bool> cancelled_ = false;
  std::optional<bool> exact_;
  std::shared_ptr<InPlacePages> in_place_;  // null before Admit
  Mutex commit_mutex_;
  int commits_ ABSL_GUARDED_BY(commit_mutex_) = 0;  // under way
  bool release_later_ ABSL_GUARDED_BY(commit_mutex_) = false;
  std::set<uint32_t> lost_;  // segments that a composition found unusable
  std::optional<Clock::time_point> asked_since_, doubtful_since_, shared_since_;  // set by Poll calls
  std::optional<std::pair<uint32_t, Clock::time_point>> layer_since_;

  std::vector<Run> runs_;
  std::vector<Reservation> reservations_;
  bool filling_ = false;
  PrefillPlan prefill_;                // segments that other engines compute
  std::vector<Run> cold_;              // one per state of prefill_
  size_t elsewhere_ = 0;               // number of segments that other engines compute, at first
  std::optional<PrefillResult> work_;  // result for another engine, not reported yet

  std::vector<Step> steps_;
  std::vector<Segment> segments_;
  Plan plan_;
  std::map<std::pair<uint32_t, uint32_t>, std::vector<Head>> heads_;
  std::map<uint32_t, Rebuilt> rebuilt_;
  std::unique_ptr<kernels::Queue> queue_;
};

struct RequestState {
  std::shared_ptr<CacheState> cache;  // goes last
  std::shared_ptr<PromptRun> prompt_run;
  std::shared_ptr<Background::Task> starting;  // null: nothing is, or it has ended
  internal::CreatorProcess creator{};
};

// Publishes what was taken out, as many as can be by one call; returns one outcome for each. Any thread.
std::vector<PublishOutcome> PublishRuns(CacheState& cache, std::span<const PromptRun::Taken> taken,
                                        std::span<const ComputedRun> computed);

// Gives up what was taken out. Any thread.
void AbandonRuns(CacheState& cache, std::span<const PromptRun::Taken> taken);

// Access to what is behind the handles, for the C and Python bindings and for tests.
struct Access {
  static CacheState* Of(const Cache& cache) { return cache.impl_; }
  static std::shared_ptr<PromptRun> Shared(const Request& request) {
    return request.impl_ == nullptr ? nullptr : request.impl_->prompt_run;
  }
  // Null while it is being started.
  static const PromptRun* Settled(const Request& request) {
    const RequestState* const state = request.impl_;
    const bool settled = state != nullptr && (state->starting == nullptr || state->starting->done());
    return settled ? state->prompt_run.get() : nullptr;
  }
  static PromptRun* Of(const Request& request) { return Shared(request).get(); }
  static void Put(CacheState* impl, Cache& cache) { cache.impl_ = impl; }
  static void Put(RequestState* impl, Request& request);
  static void Put(std::unique_ptr<JobState> impl, Job& job);
};

}  // namespace ashlar::engine
