// SPDX-License-Identifier: Apache-2.0
// PlanLanding: lands a plan's hits in the request's pages: its layers, its verdict, and pages that stay unresolved.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/in_place_pages.h"
#include "client/engine/leased_match.h"
#include "client/engine/prompt_text.h"
#include "client/engine/request_pages.h"
#include "client/engine/request_plan.h"
#include "client/session/landing.h"

namespace ashlar::engine {

// `wait`: a call waits, up to the cache's patience. Otherwise it returns kPending while it would have to wait.
class PlanLanding {
 public:
  PlanLanding(CacheState& cache, const PromptText& text, const LeasedMatch& match, RequestPlan& plan,
              RequestPages& pages)
      : cache_(cache), text_(text), match_(match), plan_(plan), pages_(pages) {}
  ~PlanLanding();  // does not wait
  PlanLanding(const PlanLanding&) = delete;
  PlanLanding& operator=(const PlanLanding&) = delete;

  // Lands these parts of the match, if there are pages for them: a model without attention has none, and needs none.
  void Start(std::vector<LandSegment> wanted);
  // Takes a landing of these parts that the lookup has started.
  void Adopt(Landing landing, std::vector<LandSegment> wanted);
  // Gets the request's pages, in caches that share in place. A prefix lands afterwards, because the tokens after its
  // shared blocks need own pages.
  Status Admit(uint32_t own_pages, PageShortage* shortage);
  const AdmittedPages& admitted() const;
  // Keeps the pages that the daemon has allocated for the request, also after its end. Null: none.
  std::shared_ptr<const void> allocated() const { return in_place_; }
  // Returns false if the match's prefix has more shared blocks than an admitted request has pages for.
  bool FitsPrefix() const { return in_place_ == nullptr || cache_.SharedBlocks(*match_) <= in_place_->blocks(); }

  // kRestart: the layer will not arrive.
  Status ReachLayer(uint32_t layer, bool wait);
  // The verdict. kRestart, kOtherPages: there is a new plan.
  Status Finish(bool wait);
  bool in_progress() const { return landing_.has_value() || !waiting_.empty(); }
  // Nothing can write to the pages any longer.
  bool quiesced() const { return !landing_.has_value() || landing_->quiesced(); }
  void Cancel();
  // Cancels, and waits until the pages are quiesced. They then belong to the engine, or stay in quarantine.
  void End(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;
  enum class Verdict : uint8_t { kPending, kTaken, kUnresolved };

  // Whether the plan can be followed in the request's pages.
  Status CheckPages() const;
  Status ReachLanded(uint32_t layer, bool wait);
  // kUnresolved: the daemon may still write to the pages.
  Verdict TakeVerdict(bool wait);
  // Returns the number of own pages that the prefix needs.
  uint64_t OwnPagesOfPrefix() const;
  // Lands waiting_ if there are enough own pages.
  void LandWaiting();
  // The parts of in_place_ that the plan reads.
  std::vector<uint32_t> SharedParts() const;
  // The segments that no plan of the request will read. They get no shared pages, because the request cannot fill them.
  std::vector<uint32_t> UnsharedSegments() const;
  InPlacePages::State FillShared();
  Status ReachShared(bool wait);
  void DropUnfilled();

  CacheState& cache_;
  const PromptText& text_;
  const LeasedMatch& match_;
  RequestPlan& plan_;
  RequestPages& pages_;
  std::shared_ptr<InPlacePages> in_place_;  // null before Admit; outlives landing_, which may write to its own pages
  std::optional<Landing> landing_;
  std::vector<LandSegment> wanted_;
  std::vector<LandSegment> waiting_;  // a prefix and tuples that wait for own pages
  std::optional<Clock::time_point> asked_since_, taken_since_, shared_since_;  // set by calls that do not wait
  std::optional<std::pair<uint32_t, Clock::time_point>> layer_since_;
};

}  // namespace ashlar::engine
