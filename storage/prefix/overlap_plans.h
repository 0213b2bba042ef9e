// SPDX-License-Identifier: Apache-2.0
// OverlapPlans: learns where prompts diverge, and plans checkpoints for new prompts of every length, in the background.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "storage/prefix/checkpoint_plan.h"
#include "storage/prefix/overlap_model.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

// Lengths are divided into ranges, 16 per doubling. A range has a plan for the length that was last asked for in it, by
// the latest forecast or, until the background has planned it again, by an earlier one (Sparse Prefix Caching §4.2 also
// plans anew after some requests). The forecast is refreshed every 64 divergences at the latest. One thread only,
// except the work that it gives to `background`.
class OverlapPlans {
 public:
  // Runs `work` on any thread and then `done` on the thread of OverlapPlans, never within the call, whose caller still
  // uses the present plans. Returns false, calling neither, if it has no space; then the work is offered again after
  // kRefreshMost requests.
  using Background = std::function<bool(std::function<void()> work, std::function<void()> done)>;

  // At most `most` checkpoints per prompt, at multiples of CheckpointGrid. Without `background`, BeginRequest does the
  // work that the requests before made due. The first kSmall divergences are learned at once: later plans are a request
  // late, which would cost most while every divergence changes them.
  OverlapPlans(const PrefixCosts& costs, uint64_t capture_tokens, size_t most, Background background);
  OverlapPlans(const OverlapPlans&) = delete;
  OverlapPlans& operator=(const OverlapPlans&) = delete;

  void BeginRequest();
  // A request diverged after `depth` tokens from an earlier one of `length` tokens. O(1).
  void Observe(uint64_t depth, uint64_t length);
  // Returns the plan for a prompt; without checkpoints if none is known for about its length. Finding it is O(1);
  // applying it is O(kParts). Valid until the next request or `done`. `guess`: the first kGuessed prompts after the
  // first divergence are also planned for divergences elsewhere (OverlapModel::Forecast).
  CheckpointPlan::Placement For(const CheckpointPlan::Prompt& prompt, bool guess = false);

  uint64_t bytes() const { return bytes_; }  // memory of the plans

 private:
  // The plan is refreshed when this fraction more has been observed, at the latest after kRefreshMost divergences.
  static constexpr uint64_t kRefreshShare = 64, kRefreshMost = 64;
  // Of each histogram; so a plan has at most 4 · kParts masses, however long the histograms are.
  static constexpr size_t kParts = 64;
  static constexpr size_t kMostPending = 1024;  // divergences that wait for the background; later ones are dropped
  static constexpr uint64_t kSmall = 256;
  static constexpr uint64_t kGuessed = 64;  // prompts
  static constexpr size_t kPerDoubling = 16, kRanges = 64 * kPerDoubling;
  static constexpr size_t kNeighbours = 4;  // ranges on each side whose plan serves one without a plan
  static constexpr size_t kPlans = 16;      // per job, so that it takes about a millisecond at most
  static constexpr uint64_t kKept = 16;     // forecasts after which a plan is dropped

  // What the work needs; untouched by others while it runs.
  struct Job {
    OverlapModel model;
    OverlapForecast forecast;
    bool guess = false;
    std::vector<std::pair<uint64_t, uint64_t>> divergences;  // depth, length
    bool refresh = false;                                    // makes a new forecast
    std::vector<uint64_t> lengths;                           // to plan for, one per range
    std::vector<std::unique_ptr<const CheckpointPlan>> plans;
  };

  static size_t Range(uint64_t tokens);
  bool IsSmall() const { return observed_ + since_.size() <= kSmall; }
  void Want(uint64_t tokens);
  void StartIfDue();
  static void Work(Job& job, const PrefixCosts& costs, uint64_t capture_tokens, size_t most);
  void Done();

  const PrefixCosts costs_;
  const uint64_t capture_tokens_;
  const size_t most_;
  const Background background_;
  const std::shared_ptr<Job> job_ = std::make_shared<Job>();
  const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);  // `done` may come after the destructor
  uint64_t guesses_ = 0;  // prompts since the first divergence, at most kGuessed
  bool guess_ = false;    // whether the last prompt may be planned for a guess
  bool running_ = false;
  uint64_t observed_ = 0, forecasts_ = 0;             // divergences and refreshes that job_ knows
  std::vector<std::pair<uint64_t, uint64_t>> since_;  // later divergences
  std::vector<uint64_t> asked_;                       // lengths since the last job, one per range, the latest kPlans
  bool stale_ = false;                                // one of these has no plan by the latest forecast
  uint64_t pause_ = 0;                                // requests until work is offered again
  struct Planned {
    std::unique_ptr<const CheckpointPlan> plan;
    uint64_t forecast = 0;
  };
  std::array<Planned, kRanges> plans_;
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::storage
