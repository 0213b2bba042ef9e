#include "storage/policy/reuse_law.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr double kMostHazard = 0.999;
constexpr double kLeastSurvival = 1e-4;  // what is left of a spell where looking further ahead changes nothing
constexpr double kMostFactor = 10;

}  // namespace

ReuseLaw::ReuseLaw() {
  changed_.fill(true);
  Refresh();
}

double ReuseLaw::BucketBegin(size_t bucket) {
  return std::exp2(static_cast<double>(bucket) / 2);
}

size_t ReuseLaw::UsesBucket(uint32_t uses) {
  if (uses <= 5) return uses;
  return uses <= 10 ? 6 : 7;
}

size_t ReuseLaw::SizeBucket(uint64_t tokens) {
  size_t bucket = 0;
  while (tokens > 1 && bucket + 1 < kSizes) {
    tokens /= 2;
    ++bucket;
  }
  return bucket;
}

// A spell that goes on has come only part of the way through its last bucket.
void ReuseLaw::Reach(Counts& counts, uint64_t age, bool used, double weight) {
  const size_t bucket = AgeBucket(age);
  for (size_t i = 0; i < bucket; ++i) counts.came[i] += weight;
  const double part = (static_cast<double>(age) - BucketBegin(bucket)) / BucketWidth(bucket);
  counts.came[bucket] += used ? weight : weight * std::clamp(part, 0.0, 1.0);
  counts.used[bucket] += used ? weight : 0;
}

double ReuseLaw::Expected(const Subject& subject, uint64_t age) const {
  const auto& hazards = hazards_[static_cast<size_t>(subject.kind)][UsesBucket(subject.uses)];
  const size_t bucket = AgeBucket(age);
  double expected = 0;
  for (size_t i = 0; i < bucket; ++i) expected += hazards[i];
  const double part = (static_cast<double>(age) - BucketBegin(bucket)) / BucketWidth(bucket);
  return expected + hazards[bucket] * std::clamp(part, 0.0, 1.0);
}

void ReuseLaw::Ended(const Subject& subject, uint64_t age, bool used) {
  const auto kind = static_cast<size_t>(subject.kind);
  Reach(ended_[kind][UsesBucket(subject.uses)], age, used);
  Factor& factor = ended_factors_[kind][SizeBucket(subject.fresh)];
  factor.uses += used ? 1 : 0;
  factor.expected += Expected(subject, age);
  changed_[kind] = true;
  remembered_ += 1;
  if (remembered_ > kRemembered) Forget();
}

void ReuseLaw::GivenUp(const Subject& subject) {
  Ended(subject, kForever, false);
}

void ReuseLaw::AskedForAgain(const Subject& subject, uint64_t age) {
  const auto kind = static_cast<size_t>(subject.kind);
  Counts& counts = ended_[kind][UsesBucket(subject.uses)];
  Reach(counts, kForever, false, -1);
  for (double& came : counts.came) came = std::max(came, 0.0);  // it may have been forgotten in part
  Factor& factor = ended_factors_[kind][SizeBucket(subject.fresh)];
  factor.expected = std::max(factor.expected - Expected(subject, kForever), 0.0);
  Ended(subject, age, true);
}

void ReuseLaw::GoesOn(const Subject& subject, uint64_t age) {
  const auto kind = static_cast<size_t>(subject.kind);
  changed_[kind] = goes_on_[kind] = true;
  Reach(going_on_[kind][UsesBucket(subject.uses)], age, false);
  going_on_factors_[kind][SizeBucket(subject.fresh)].expected += Expected(subject, age);
}

void ReuseLaw::Forget() {
  remembered_ /= 2;
  changed_.fill(true);
  for (auto& kind : ended_) {
    for (Counts& counts : kind) {
      for (double& came : counts.came) came /= 2;
      for (double& used : counts.used) used /= 2;
    }
  }
  for (auto& kind : ended_factors_) {
    for (Factor& factor : kind) factor = {.uses = factor.uses / 2, .expected = factor.expected / 2};
  }
}

void ReuseLaw::Refresh() {
  for (size_t kind = 0; kind < kReuseKinds; ++kind) {
    if (!changed_[kind]) continue;
    std::array<Counts, kUses> known = ended_[kind];
    Counts all;
    for (size_t uses = 0; uses < kUses; ++uses) {
      for (size_t age = 0; age < kAges; ++age) {
        known[uses].came[age] += going_on_[kind][uses].came[age];
        all.came[age] += known[uses].came[age];
        all.used[age] += known[uses].used[age];
      }
    }
    for (size_t uses = 0; uses < kUses; ++uses) SetRates(kind, uses, known[uses], all);
    for (size_t size = 0; size < kSizes; ++size) {
      const Factor& factor = ended_factors_[kind][size];
      const double expected = factor.expected + going_on_factors_[kind][size].expected;
      const double ratio = (factor.uses + kSizeWeight) / (expected + kSizeWeight);
      factors_[kind][size] = std::clamp(ratio, 1 / kMostFactor, kMostFactor);
    }
  }
  if (std::ranges::find(goes_on_, true) != goes_on_.end()) {
    going_on_ = {};
    going_on_factors_ = {};
  }
  changed_ = std::exchange(goes_on_, {});
}

void ReuseLaw::SetRates(size_t kind, size_t uses, const Counts& counts, const Counts& kinds) {
  auto& hazards = hazards_[kind][uses];
  for (size_t age = 0; age < kAges; ++age) {
    const double of_kind = (kinds.used[age] + kHazard * kHazardWeight) / (kinds.came[age] + kHazardWeight);
    const double hazard = (counts.used[age] + of_kind * kKindWeight) / (counts.came[age] + kKindWeight);
    hazards[age] = std::min(hazard, kMostHazard);
  }
  for (size_t from = 0; from < kAges; ++from) {
    double survives = 1, gained = 0, waited = 0, best = 0;
    for (size_t age = from; age < kAges && survives > kLeastSurvival; ++age) {
      const double ends = survives * hazards[age], width = BucketWidth(age);
      gained += ends;
      waited += (survives - ends / 2) * width;  // what ends in a bucket ends, on average, in its middle
      survives -= ends;
      best = std::max(best, gained / waited);
    }
    rates_[kind][uses][from] = best;
  }
}

ReuseLaw::Class ReuseLaw::ClassOf(const Subject& subject) {
  return {.kind = static_cast<uint8_t>(subject.kind),
          .uses = static_cast<uint8_t>(UsesBucket(subject.uses)),
          .size = static_cast<uint8_t>(SizeBucket(subject.fresh))};
}

}  // namespace ashlar::storage
