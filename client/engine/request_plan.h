// SPDX-License-Identifier: Apache-2.0
// RequestPlan: which hits of its match a request takes from the cache, and the steps that follow from that.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/chain.h"
#include "client/engine/leased_match.h"
#include "client/engine/prompt_text.h"
#include "proto/outcome.h"

namespace ashlar::engine {

// Segments are numbered as in the prompt; LandSegment::kPrefix is the match's prefix. view() and steps() change only
// when Make() is called.
class RequestPlan {
 public:
  RequestPlan(const CacheState& cache, const PromptText& text, const LeasedMatch& match)
      : cache_(cache), text_(text), match_(match) {}

  // Begins again with the match, and uses nothing of it yet.
  void TakeMatch();
  // Begins again without a match: every segment is a miss.
  void MissAll(MissReason reason);
  void Use(uint32_t segment) { SetUsed(segment, true); }
  // A hit failed to land: the plan must not be followed any further.
  void Drop(uint32_t segment, MissReason reason);
  void UseNothing();
  void Make();

  // While the engine fills the prompt's misses there is nothing to follow.
  void SetFilling(bool filling) { filling_ = filling; }
  bool filling() const { return filling_; }
  // The plan must not be followed any further, or differs from the requested one. Finish then makes another, without
  // the segments `lost`. Returns kRestart.
  Status Abandon(std::span<const uint32_t> lost = {});
  bool abandoned() const { return abandoned_; }
  // Everything has landed, or failed to. kRestart: there is a new plan.
  Status Finish();
  // Makes a plan without these segments. Returns kRestart.
  Status DropSegments(std::span<const uint32_t> segments);

  const Plan& view() const { return plan_; }
  std::span<const Step> steps() const { return steps_; }
  std::span<const MissReason> reasons() const { return reasons_; }  // one reason per segment
  bool uses_any() const;
  bool uses_all() const;  // false: some hits were dropped
  bool uses_prefix() const { return prefix_used_; }
  std::vector<uint32_t> UsedSegments() const;  // without the prefix
  // Whether the results of a finished plan are exact; nothing if it is not finished.
  std::optional<bool> exact() const { return exact_; }
  uint64_t revision() const { return revision_; }  // differs after each Make
  // The plan for other processes (plan_bytes.h); empty if it uses nothing.
  std::string Encode() const;

 private:
  void SetUsed(uint32_t segment, bool used);
  // The depths at which states are wanted, ascending.
  std::vector<uint64_t> Captures() const;

  const CacheState& cache_;
  const PromptText& text_;
  const LeasedMatch& match_;
  std::vector<bool> used_;  // segments that the plan takes from the cache
  bool prefix_used_ = false;
  std::vector<uint64_t> captures_;
  std::vector<MissReason> reasons_;
  bool filling_ = false, abandoned_ = false;
  std::vector<uint32_t> lost_;  // segments that a composition found unusable
  std::optional<bool> exact_;

  std::vector<Step> steps_;
  std::vector<Segment> segments_;
  Plan plan_;
  uint64_t revision_ = 0;
};

}  // namespace ashlar::engine
