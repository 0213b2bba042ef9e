// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_model.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr double kMostHazard = 0.999;
constexpr double kMostFactor = 10;

}  // namespace

ReuseModel::ReuseModel() {
  kinds_.fill(&Unknown());
}

const ReuseModel::Kind& ReuseModel::Unknown() {
  static const Kind kUnknown = [] {
    Kind kind;
    Refresh(kind);
    return kind;
  }();
  return kUnknown;
}

ReuseModel::Kind& ReuseModel::Of(size_t kind) {
  if (own_[kind] == nullptr) kinds_[kind] = (own_[kind] = std::make_unique<Kind>(Unknown())).get();
  return *own_[kind];
}

size_t ReuseModel::UsesBucket(uint32_t uses) {
  if (uses <= 5) return uses;
  return uses <= 10 ? 6 : 7;
}

double ReuseModel::PartOf(size_t bucket, uint64_t age) {
  return std::clamp((static_cast<double>(age) - BucketBegin(bucket)) / BucketWidth(bucket), 0.0, 1.0);
}

// An unfinished spell has covered only a part of its last bucket.
void ReuseModel::RecordAge(Counts& counts, uint64_t age, bool used) {
  const size_t bucket = AgeBucket(age);
  counts.last[bucket] += 1;
  counts.through[bucket] += used ? 1 : PartOf(bucket, age);
  counts.used[bucket] += used ? 1 : 0;
}

double ReuseModel::Hazards(const Subject& subject, uint64_t age) const {
  const auto& before = kinds_[static_cast<size_t>(subject.kind)]->hazards_before[UsesBucket(subject.uses)];
  const size_t bucket = AgeBucket(age);
  return before[bucket] + (before[bucket + 1] - before[bucket]) * PartOf(bucket, age);
}

void ReuseModel::Ended(const Subject& subject, uint64_t age, bool used) {
  const auto kind = static_cast<size_t>(subject.kind);
  Kind& of = Of(kind);
  RecordAge(of.ended[UsesBucket(subject.uses)], age, used);
  Factor& factor = of.ended_factors[SizeBucket(subject.fresh)];
  factor.uses += used ? 1 : 0;
  factor.expected += Hazards(subject, age);
  changed_[kind] = true;
  remembered_ += 1;
  if (remembered_ > kRemembered) Erase();
}

void ReuseModel::GivenUp(const Subject& subject) {
  Ended(subject, kForever, false);
}

void ReuseModel::AskedForAgain(const Subject& subject, uint64_t age) {
  Kind& kind = Of(static_cast<size_t>(subject.kind));
  Counts& counts = kind.ended[UsesBucket(subject.uses)];
  // Decay may have made these smaller than 1.
  for (double* of : {&counts.last.back(), &counts.through.back()}) *of = std::max(*of - 1, 0.0);
  Factor& factor = kind.ended_factors[SizeBucket(subject.fresh)];
  factor.expected = std::max(factor.expected - Hazards(subject, kForever), 0.0);
  Ended(subject, age, true);
}

void ReuseModel::GoesOn(const Subject& subject, uint64_t age) {
  const auto kind = static_cast<size_t>(subject.kind);
  changed_[kind] = goes_on_[kind] = true;
  Kind& of = Of(kind);
  RecordAge(of.going_on[UsesBucket(subject.uses)], age, false);
  of.going_on_factors[SizeBucket(subject.fresh)].expected += Hazards(subject, age);
}

void ReuseModel::Erase() {
  remembered_ /= 2;
  changed_.fill(true);
  for (const std::unique_ptr<Kind>& kind : own_) {
    if (kind == nullptr) continue;
    for (Counts& counts : kind->ended) {
      for (auto* of : {&counts.last, &counts.through, &counts.used}) {
        for (double& count : *of) count /= 2;
      }
    }
    for (Factor& factor : kind->ended_factors) factor = {.uses = factor.uses / 2, .expected = factor.expected / 2};
  }
}

void ReuseModel::Refresh() {
  const bool goes_on = std::ranges::find(goes_on_, true) != goes_on_.end();
  for (size_t kind = 0; kind < kReuseKinds; ++kind) {
    if (own_[kind] == nullptr) continue;
    if (changed_[kind]) Refresh(*own_[kind]);
    if (!goes_on) continue;
    own_[kind]->going_on = {};
    own_[kind]->going_on_factors = {};
  }
  changed_ = std::exchange(goes_on_, {});
}

void ReuseModel::Refresh(Kind& kind) {
  std::array<Known, kUses> known{};
  Known all;
  for (size_t uses = 0; uses < kUses; ++uses) {
    const Counts &ended = kind.ended[uses], &going_on = kind.going_on[uses];
    double later = 0;
    for (size_t age = kAges; age-- > 0;) {
      known[uses].came[age] = later + ended.through[age] + going_on.through[age];
      known[uses].used[age] = ended.used[age];
      later += ended.last[age] + going_on.last[age];
      all.came[age] += known[uses].came[age];
      all.used[age] += known[uses].used[age];
    }
  }
  for (size_t uses = 0; uses < kUses; ++uses) SetRates(kind, uses, known[uses], all);
  for (size_t size = 0; size < kSizes; ++size) {
    const Factor& factor = kind.ended_factors[size];
    const double expected = factor.expected + kind.going_on_factors[size].expected;
    const double ratio = (factor.uses + kSizeWeight) / (expected + kSizeWeight);
    kind.factors[size] = std::clamp(ratio, 1 / kMostFactor, kMostFactor);
  }
}

void ReuseModel::SetRates(Kind& kind, size_t uses, const Known& counts, const Known& kinds) {
  std::array<double, kAges> hazards;
  auto& before = kind.hazards_before[uses];
  for (size_t age = 0; age < kAges; ++age) {
    const double of_kind = (kinds.used[age] + kHazard * kHazardWeight) / (kinds.came[age] + kHazardWeight);
    const double hazard = (counts.used[age] + of_kind * kKindWeight) / (counts.came[age] + kKindWeight);
    hazards[age] = std::min(hazard, kMostHazard);
    before[age + 1] = before[age] + hazards[age];
  }
  // From the last age to the first: a stretch of ages that begins at this one, extended as long as what follows gains
  // more per waited request than the stretch so far. So each age is merged once.
  struct Stretch {
    double gained, waited, survives;
  };
  std::array<Stretch, kAges> later;
  size_t count = 0;
  for (size_t age = kAges; age-- > 0;) {
    // Spells that end in a bucket end in its middle on average.
    Stretch stretch{hazards[age], (1 - hazards[age] / 2) * BucketWidth(age), 1 - hazards[age]};
    for (; count > 0 && later[count - 1].gained * stretch.waited > stretch.gained * later[count - 1].waited; --count) {
      const Stretch& next = later[count - 1];
      stretch = {stretch.gained + stretch.survives * next.gained, stretch.waited + stretch.survives * next.waited,
                 stretch.survives * next.survives};
    }
    kind.rates[uses][age] = stretch.gained / stretch.waited;
    later[count++] = stretch;
  }
}

ReuseModel::Class ReuseModel::ClassOf(const Subject& subject) {
  return {.kind = static_cast<uint8_t>(subject.kind),
          .uses = static_cast<uint8_t>(UsesBucket(subject.uses)),
          .size = static_cast<uint8_t>(SizeBucket(subject.fresh))};
}

}  // namespace ashlar::storage
