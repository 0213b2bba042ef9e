// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_plans.h"

#include <algorithm>
#include <bit>

namespace ashlar::storage {

OverlapPlans::OverlapPlans(const PrefixCosts& costs, uint64_t capture_tokens, size_t most, Background background)
    : costs_(costs), capture_tokens_(capture_tokens), most_(most), background_(std::move(background)) {}

size_t OverlapPlans::Range(uint64_t tokens) {
  static_assert(kPerDoubling == 16);
  const auto doublings = static_cast<unsigned>(std::bit_width(tokens | 1)) - 1;
  const uint64_t scaled = doublings >= 4 ? tokens >> (doublings - 4) : tokens << (4 - doublings);  // in [16, 32)
  return doublings * kPerDoubling + static_cast<size_t>(scaled % kPerDoubling);
}

void OverlapPlans::BeginRequest() {
  if (!background_) StartIfDue();
}

void OverlapPlans::Observe(uint64_t depth, uint64_t length) {
  if (since_.size() < kMostPending) since_.emplace_back(depth, length);
}

CheckpointPlan::Placement OverlapPlans::For(const CheckpointPlan::Prompt& prompt, bool guess) {
  if (observed_ + since_.size() > 0 && guesses_ < kGuessed) ++guesses_;
  guess_ = guess && guesses_ < kGuessed;
  const size_t range = Range(prompt.tokens);
  Want(prompt.tokens);
  stale_ = stale_ || plans_[range].plan == nullptr || plans_[range].forecast != forecasts_;
  if (background_ || IsSmall()) StartIfDue();
  const CheckpointPlan* plan = plans_[range].plan.get();
  for (size_t away = 1; plan == nullptr && away <= kNeighbours; ++away) {
    if (range >= away) plan = plans_[range - away].plan.get();
    if (plan == nullptr && range + away < kRanges) plan = plans_[range + away].plan.get();
  }
  if (plan == nullptr) return {};
  return plan->For(prompt, CheckpointGrid(prompt.tokens, capture_tokens_),
                   [this](uint64_t depth) { return costs_.Flops(depth); });
}

void OverlapPlans::Want(uint64_t tokens) {
  const auto same = std::ranges::find(asked_, Range(tokens), Range);
  if (same != asked_.end()) {
    asked_.erase(same);
  } else if (asked_.size() == kPlans) {
    asked_.erase(asked_.begin());
  }
  asked_.push_back(tokens);
}

void OverlapPlans::StartIfDue() {
  if (running_ || (pause_ > 0 && pause_-- > 0)) return;
  const uint64_t all = observed_ + since_.size();
  if (all == 0) return;
  const bool learned = !since_.empty() && since_.size() >= std::min(all / kRefreshShare, kRefreshMost);
  const bool refresh = learned || guess_ != job_->guess;
  if (!refresh && !stale_) return;
  job_->divergences = refresh ? since_ : std::vector<std::pair<uint64_t, uint64_t>>();
  job_->refresh = refresh;
  job_->guess = guess_;
  job_->lengths = asked_;
  auto work = [job = job_, costs = costs_, capture_tokens = capture_tokens_, most = most_] {
    Work(*job, costs, capture_tokens, most);
  };
  const bool at_once = !background_ || IsSmall();
  if (at_once) {
    work();
  } else if (!background_(work, [this, alive = std::weak_ptr(alive_)] {
               if (!alive.expired()) Done();
             })) {
    pause_ = kRefreshMost;
    return;
  }
  if (refresh) {
    observed_ += since_.size();
    since_.clear();
    ++forecasts_;
  }
  asked_.clear();
  stale_ = false;
  running_ = true;
  if (at_once) Done();
}

void OverlapPlans::Work(Job& job, const PrefixCosts& costs, uint64_t capture_tokens, size_t most) {
  for (const auto& [depth, length] : job.divergences) job.model.Observe(depth, length);
  if (job.refresh) job.forecast = job.model.Forecast(kParts, job.guess);
  job.plans.clear();
  for (const uint64_t length : job.lengths) {
    job.plans.push_back(std::make_unique<const CheckpointPlan>(job.forecast.Within(length), length,
                                                               CheckpointGrid(length, capture_tokens), most,
                                                               [&](uint64_t depth) { return costs.Flops(depth); }));
  }
}

void OverlapPlans::Done() {
  running_ = false;
  for (size_t i = 0; i < job_->lengths.size(); ++i) {
    plans_[Range(job_->lengths[i])] = {std::move(job_->plans[i]), forecasts_};
  }
  bytes_ = sizeof(*this);
  for (Planned& planned : plans_) {
    if (planned.plan == nullptr) continue;
    if (planned.forecast + kKept < forecasts_) {
      planned.plan.reset();
    } else {
      bytes_ += planned.plan->bytes();
    }
  }
}

}  // namespace ashlar::storage
