// SPDX-License-Identifier: Apache-2.0
// Operators' work on many objects: erasing a tenant, and verifying all copies.
#include <optional>

#include "tests/simulation/driver.h"

namespace ashlar::simulation {
namespace {

constexpr uint64_t kVerifyRate = uint64_t{1} << 20;  // a second: some objects in each Advance
constexpr Nanos kSecond = 1'000'000'000;
constexpr int kRounds = 10'000;

}  // namespace

// Begins to erase a tenant, or continues.
void Driver::Erase() {
  if (erasure_ != nullptr) return GoOnErasure();
  if (Draw(4) != 0) return;
  erases_ = 1 + Draw(kTenants);
  const auto begun = cache().upkeep().Erase(erases_, "tenant" + std::to_string(erases_), std::nullopt);
  if (!begun.ok()) return Fail("a tenant is not erased, and the disk is there");
  erasure_ = *begun;
  erased_is_gone_ = false;
  republished_.clear();
  evicted_prefixes_ = true;
  for (const auto& [text, plan] : Plans()) {
    if (text.first == erases_) operator_evicted_.insert(text);
  }
}

void Driver::GoOnErasure() {
  storage::Slice slice = AnySlice();
  const bool done = erasure_->Run(slice);
  const bool gone = erasure_->progress().found_gone;
  if (done && !gone) Fail("erased, and still to be found");
  const auto is_of_it = [this](const Text& text) { return text.first == erases_ && !republished_.contains(text); };
  if (gone && !std::exchange(erased_is_gone_, true)) {
    for (const auto& [text, plan] : Plans()) {
      if (is_of_it(text) && IsThere(text)) Fail("a tenant is erased, and something of it is there");
    }
  }
  if (!done && !(gone && world_.bug == Bug::kErasesTooEarly)) return;
  for (const auto& [text, plan] : Plans()) {
    if (is_of_it(text)) erased_[text] = report_.step;
  }
  erasure_ = nullptr;
  Reach(Event::kErased);
}

bool Driver::IsThere(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return !cache().upkeep().inventory().Where(text.first, plan.key, plan.shard).empty();
}

// What was acknowledged as erased does not return, with or without a crash.
void Driver::CheckErased() {
  for (const auto& [text, step] : erased_) {
    if (IsThere(text)) return Fail("what was erased is there again");
  }
}

void Driver::Verify() {
  storage::Scrubber& scrubber = cache().upkeep().scrubber();
  if (!scrubber.report().running && Draw(4) == 0) scrubber.Start(kVerifyRate);
  const uint64_t before = Damaged();
  scrubber.Tick();
  if (Damaged() > before) CheckDamage();
}

uint64_t Driver::Damaged() {
  uint64_t damaged = 0;
  for (const uint64_t of_tier : cache().upkeep().scrubber().totals().damaged) damaged += of_tier;
  return damaged;
}

void Driver::CheckDamage() {
  for (const storage::Scrubber::Damage& damage : cache().upkeep().scrubber().report().findings) {
    const bool unread = damage.reason == MissReason::kTierError;
    if (unread ? !TierFailed() : !Corrupted(damage.pool.tenant))
      Fail("a copy is called damaged, and nothing damaged it");
  }
}

// The disk is healthy: started operations end.
void Driver::ConcludeUpkeep() {
  storage::Scrubber& scrubber = cache().upkeep().scrubber();
  for (int round = 0; scrubber.report().running || erasure_ != nullptr; ++round) {
    if (round == kRounds) return Fail("an operator's work does not end");
    world_.clock.Advance(kSecond);
    scrubber.Tick();
    if (erasure_ != nullptr) GoOnErasure();
    if (round % 8 == 0) cache().Tick();
    RunAll();
  }
  CheckDamage();
  CheckErased();
}

}  // namespace ashlar::simulation
