// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/upkeep_actions.h"

#include <optional>
#include <string>
#include <utility>

namespace ashlar::simulation {
namespace {

constexpr uint64_t kVerifyRate = uint64_t{1} << 20;  // a second: some objects in each Advance
constexpr Nanos kSecond = 1'000'000'000;
constexpr int kRounds = 10'000;

}  // namespace

void UpkeepActions::Operate() {
  const Text text = AnyText(1 + Draw(kTenants));
  const Key& key = Plans().at(text).key;
  if (history_.drains || Draw(16) == 0) {
    history_.drains = !history_.drains;
    return history_.drains ? cache().offers().StartDrain() : cache().offers().EndDrain();
  }
  switch (Draw(3)) {
    case 0:
      for (const Text& part : BundleOf(text)) history_.operator_evicted.insert(part);
      cache().retention().Evict(text.first, key);
      break;
    case 1: {
      const Nanos until = world_.clock.Now() + static_cast<Nanos>(Draw(kDeadline));
      if (!cache().retention().Pin(text.first, key, until)) break;
      for (const Text& part : BundleOf(text)) history_.pins[part] = until;
      break;
    }
    default:
      cache().retention().Unpin(text.first, key);
      for (const Text& part : BundleOf(text)) history_.pins.erase(part);
  }
}

// Begins to erase a tenant, or continues.
void UpkeepActions::Erase() {
  if (erasure_ != nullptr) return GoOnErasure();
  if (Draw(4) != 0) return;
  erases_ = 1 + Draw(kTenants);
  const auto begun = cache().upkeep().Erase(erases_, "tenant" + std::to_string(erases_), std::nullopt);
  if (!begun.ok()) return Fail("a tenant is not erased, and the disk is there");
  erasure_ = *begun;
  erased_is_gone_ = false;
  history_.republished.clear();
  history_.evicted_prefixes = true;
  for (const auto& [text, plan] : Plans()) {
    if (text.first == erases_) history_.operator_evicted.insert(text);
  }
}

void UpkeepActions::GoOnErasure() {
  storage::Slice slice = AnySlice();
  const bool done = erasure_->Run(slice);
  const bool gone = erasure_->progress().found_gone;
  if (done && !gone) Fail("erased, and still to be found");
  const auto is_of_it = [this](const Text& text) {
    return text.first == erases_ && !history_.republished.contains(text);
  };
  if (gone && !std::exchange(erased_is_gone_, true)) {
    for (const auto& [text, plan] : Plans()) {
      if (is_of_it(text) && oracle_.IsThere(text)) Fail("a tenant is erased, and something of it is there");
    }
  }
  if (!done && !(gone && world_.bug == Bug::kErasesTooEarly)) return;
  for (const auto& [text, plan] : Plans()) {
    if (is_of_it(text)) history_.erased[text] = report_.step;
  }
  erasure_ = nullptr;
  Reach(Event::kErased);
}

void UpkeepActions::Verify() {
  storage::Scrubber& scrubber = cache().upkeep().scrubber();
  if (!scrubber.report().running && Draw(4) == 0) scrubber.Start(kVerifyRate);
  const uint64_t before = Damaged();
  scrubber.Tick();
  if (Damaged() > before) CheckDamage();
}

uint64_t UpkeepActions::Damaged() {
  uint64_t damaged = 0;
  for (const uint64_t of_tier : cache().upkeep().scrubber().totals().damaged) damaged += of_tier;
  return damaged;
}

void UpkeepActions::CheckDamage() {
  for (const storage::Scrubber::Damage& damage : cache().upkeep().scrubber().report().findings) {
    const bool unread = damage.reason == MissReason::kTierError;
    if (unread ? !oracle_.TierFailed() : !oracle_.Corrupted(damage.pool.tenant))
      Fail("a copy is called damaged, and nothing damaged it");
  }
}

// The disk is healthy: started operations end.
void UpkeepActions::Conclude() {
  storage::Scrubber& scrubber = cache().upkeep().scrubber();
  for (int round = 0; scrubber.report().running || erasure_ != nullptr; ++round) {
    if (round == kRounds) return Fail("an operator's work does not end");
    world_.clock.Advance(kSecond);
    scrubber.Tick();
    if (erasure_ != nullptr) GoOnErasure();
    if (round % 8 == 0) cache().Tick();
    work_.RunAll();
  }
  CheckDamage();
  oracle_.CheckErased();
}

void UpkeepActions::Crashed() {
  if (std::exchange(erasure_, nullptr) != nullptr) history_.half_erased.insert(erases_);
}

}  // namespace ashlar::simulation
