// Operators' work on many objects: forgetting a tenant, and verifying all copies.
#include <optional>

#include "tests/simulation/driver.h"

namespace ashlar::simulation {
namespace {

constexpr uint64_t kVerifyRate = uint64_t{1} << 20;  // a second: some objects in each Advance
constexpr Nanos kSecond = 1'000'000'000;
constexpr int kRounds = 10'000;

}  // namespace

// Begins to forget a tenant, or goes on with that.
void Driver::Forget() {
  if (forgetting_ != nullptr) return GoOnForgetting();
  if (Draw(4) != 0) return;
  forgets_ = 1 + Draw(kTenants);
  const auto begun = cache().upkeep().Forget(forgets_, "tenant" + std::to_string(forgets_), std::nullopt);
  if (!begun.ok()) return Fail("a tenant is not forgotten, and the disk is there");
  forgetting_ = *begun;
  forgotten_is_gone_ = false;
  republished_.clear();
  evicted_prefixes_ = true;
  for (const auto& [text, plan] : Plans()) {
    if (text.first == forgets_) operator_evicted_.insert(text);
  }
}

void Driver::GoOnForgetting() {
  storage::Slice slice = AnySlice();
  const bool done = forgetting_->Run(slice);
  const bool gone = forgetting_->progress().found_gone;
  if (done && !gone) Fail("forgotten, and still to be found");
  const auto is_of_it = [this](const Text& text) { return text.first == forgets_ && !republished_.contains(text); };
  if (gone && !std::exchange(forgotten_is_gone_, true)) {
    for (const auto& [text, plan] : Plans()) {
      if (is_of_it(text) && IsThere(text)) Fail("a tenant is forgotten, and something of it is there");
    }
  }
  if (!done && !(gone && world_.bug == Bug::kForgetsTooEarly)) return;
  for (const auto& [text, plan] : Plans()) {
    if (is_of_it(text)) forgotten_[text] = report_.step;
  }
  forgetting_ = nullptr;
  Reach(Event::kForgotten);
}

bool Driver::IsThere(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return !cache().Where(text.first, plan.key, plan.shard).empty();
}

// What was acknowledged as forgotten does not come back, with a crash or without one.
void Driver::CheckForgotten() {
  for (const auto& [text, step] : forgotten_) {
    if (IsThere(text)) return Fail("what was forgotten is there again");
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

// The disk is well: what was begun ends.
void Driver::ConcludeUpkeep() {
  storage::Scrubber& scrubber = cache().upkeep().scrubber();
  for (int round = 0; scrubber.report().running || forgetting_ != nullptr; ++round) {
    if (round == kRounds) return Fail("an operator's work does not end");
    world_.clock.Advance(kSecond);
    scrubber.Tick();
    if (forgetting_ != nullptr) GoOnForgetting();
    if (round % 8 == 0) cache().Tick();
    RunAll();
  }
  CheckDamage();
  CheckForgotten();
}

}  // namespace ashlar::simulation
