// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/driver.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "proto/limits.h"

namespace ashlar::simulation {

Sizes Driver::DrawSizes(uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x5EED);
  constexpr size_t kThreads[] = {1, 2, 4, SIZE_MAX};
  Sizes sizes{.hbm = random() % 3 == 0 ? 10 + random() % 8 : 0, .dram = 12 + random() % 12, .ssd = 16 + random() % 24};
  sizes.threads = kThreads[random() % std::size(kThreads)];
  sizes.in_flight = random() % 2 == 0 ? 1 + random() % 4 : SIZE_MAX;
  sizes.ttl = random() % 2 == 0 ? static_cast<Nanos>(kDeadline / 2 + random() % kDeadline) : 0;
  return sizes;
}

Driver::Driver(uint64_t seed, Bug bug) : Context(seed, DrawSizes(seed), bug), DriverPart(static_cast<Context&>(*this)) {
  std::mt19937_64 random(seed ^ 0xFEA7);
  features = {.prompts = random() % 4 > 0, .compositions = random() % 2 > 0, .pages = random() % 2 > 0};
  features.slices = random() % 2 > 0;
  AddOperations();
  for (int i = 0; i < kSessions; ++i) Open();
}

void Driver::AddOperations() {
  const auto add = [this](uint64_t weight, auto& part, auto act) {
    operations_.push_back({weight, [&part, act] { (part.*act)(); }});
    weight_ += weight;
  };
  add(120, segments_, &SegmentActions::Reserve);
  add(120, segments_, &SegmentActions::Publish);
  add(20, segments_, &SegmentActions::Abandon);
  add(130, slices_, &SliceActions::Lookup);
  add(10, segments_, &SegmentActions::Attach);
  add(60, slices_, &SliceActions::Release);
  add(70, *this, &Driver::Land);
  add(10, landings_, &LandingActions::Quiesce);
  add(20, *this, &Driver::Die);
  add(20, *this, &Driver::Advance);
  add(15, slices_, &SliceActions::Tick);
  add(30, work_, &WorkActions::SetFaults);
  add(5, *this, &Driver::Crash);
  add(10, upkeep_, &UpkeepActions::Operate);
  add(6, upkeep_, &UpkeepActions::Erase);
  add(12, upkeep_, &UpkeepActions::Verify);
  add(335, work_, &WorkActions::Execute);
  add(4, work_, &WorkActions::HangDisk);
  if (features_.slices) add(150, slices_, &SliceActions::GoOn);
  if (features_.prompts) add(40, prompts_, &PromptActions::Commit);
  if (features_.prompts) add(3, prompts_, &PromptActions::Operate);
  if (features_.compositions) add(30, compositions_, &CompositionActions::Compose);
  if (features_.pages) {
    for (const TenantId tenant : {1, 2}) pages_.AddRegion(tenant);
    add(4, pages_, &PageActions::Declare);
    add(20, pages_, &PageActions::Admit);
    add(8, pages_, &PageActions::Extend);
    add(35, pages_, &PageActions::Fill);
    add(12, pages_, &PageActions::EndRequest);
  }
}

Report Driver::Run(int operations) {
  for (report_.step = 0; static_cast<int>(report_.step) < operations && report_.failure.empty(); ++report_.step) {
    Step();
    coverage_.NoteNew();
    oracle_.CheckBudgets();
    oracle_.CheckTurns();
    if (report_.step % 16 == 0) oracle_.CheckLeases();
    if (report_.step % 16 == 8) pages_.CheckPages();
  }
  if (report_.failure.empty()) Conclude();
  report_.transitions.counts = world_.copy_transitions;
  return report_;
}

void Driver::Open() {
  clients_.sessions.push_back(clients_.next_session++);
  cache().OpenSession(clients_.sessions.back(), TenantOf(clients_.sessions.back()));
}

void Driver::Step() {
  uint64_t choice = Draw(weight_);
  Trace(choice);
  auto operation = operations_.begin();
  for (; choice >= operation->weight; ++operation) choice -= operation->weight;
  operation->act();
}

void Driver::Land() {
  if (clients_.leases.empty()) return;
  Lease& lease = *Any(clients_.leases);
  const bool prefix = lease.asked && (lease.texts.empty() || Draw(2) == 0);
  if (prefix) return prompts_.Land(lease);
  if (!lease.texts.empty()) segments_.Land(lease);
}

void Driver::Die() {
  const auto dead = Any(clients_.sessions);
  const SessionId session = *dead;
  coverage_.Note(Fault::kEngineDeath);
  std::erase_if(clients_.leases, [&](const Lease& lease) { return lease.session == session; });
  std::erase_if(clients_.reservations, [&](const Reservation& r) { return r.session == session && !r.publishing; });
  for (auto& [number, landing] : clients_.landings) landing.cancelled |= landing.session == session;
  for (auto& [number, composition] : clients_.compositions) composition.cancelled |= composition.session == session;
  pages_.EndRequestsOf(session);
  ++clients_.draining;
  slices_.Close(session, [this, session] {
    --clients_.draining;
    const auto of_session = [session](const auto& item) { return item.second.session == session; };
    if (std::ranges::any_of(clients_.landings, of_session)) Fail("a session is drained before its landing");
    if (std::ranges::any_of(clients_.compositions, of_session)) Fail("a session is drained before its composition");
    if (std::ranges::any_of(clients_.commits, of_session)) Fail("a session is drained before its commit");
  });
  clients_.sessions.erase(dead);
  Open();
}

// Time passes before overdue items are processed.
void Driver::Advance() {
  world_.clock.Advance(static_cast<Nanos>(Draw(kDeadline / 2)));
}

void Driver::Crash() {
  coverage_.Note(Fault::kCrash);
  clients_.DropSlices();
  using Name = std::tuple<TenantId, Key, TensorShard>;
  std::vector<Name> names;
  for (const auto& [text, plan] : Plans()) names.emplace_back(text.first, plan.key, plan.shard);
  for (const auto& [tenant, key] : prompts_.written()) names.emplace_back(tenant, key, TensorShard{});
  const auto on_disk = [this](const Name& name) {
    const auto& [tenant, key, shard] = name;
    return std::ranges::count(cache().upkeep().inventory().Where(tenant, key, shard), TierKind::kSsd) > 0;
  };
  std::erase_if(names, [&](const Name& name) { return !on_disk(name); });
  clients_.DropAll();
  pages_.Crashed();
  upkeep_.Crashed();
  oracle_.Crashed();
  history_.Crashed(world_.clock.Now());
  world_.CrashAndRestart();
  for (int i = 0; i < kSessions; ++i) Open();
  if (!std::ranges::all_of(names, on_disk)) Fail("what the disk acknowledged is not there after a crash");
  oracle_.CheckErased();
}

// The disk has been healthy for a while, and ticks have passed: everything that it has space for is written.
void Driver::CheckWrittenAgain() {
  if (world_.ssd->health().degraded()) return Fail("a disk that is well again is not written");
  cache().offers().StartDrain();
  work_.RunAll();
  for (const auto& [text, plan] : Plans()) {
    const std::vector<TierKind> where = cache().upkeep().inventory().Where(text.first, plan.key, plan.shard);
    if (where.empty() || where.back() == TierKind::kSsd) continue;
    const storage::TierUsage usage = world_.ssd->Usage(text.first);
    if (usage.used_bytes + plan.Extents() * limits::kExtentBytes <= usage.capacity_bytes) {
      Fail("an object stays in memory only although a healthy disk has space");
    }
  }
  cache().offers().EndDrain();
}

// Everything ends; then nothing is held, and every tenant has all of its space.
void Driver::Conclude() {
  slices_.EndAll();
  cache().offers().EndDrain();
  work_.Heal();
  for (const SessionId session : clients_.sessions) {
    for (auto& [number, landing] : clients_.landings) landing.cancelled = true;
    for (auto& [number, composition] : clients_.compositions) composition.cancelled = true;
    pages_.EndRequestsOf(session);
    ++clients_.draining;
    cache().CloseSession(session, [this] { --clients_.draining; });
  }
  clients_.leases.clear();
  for (int round = 0; round < 3; ++round) {
    work_.RunAll();
    if (!report_.failure.empty()) return;
    world_.clock.Advance(2 * kDeadline);
    cache().Tick();
  }
  const Cache::Stats stats = cache().stats();
  const bool answered = clients_.landings.empty() && clients_.compositions.empty() && clients_.commits.empty() &&
                        clients_.searches.empty();
  if (!answered || clients_.draining > 0) return Fail("a call was never answered");
  if (stats.landings + stats.compositions + stats.leases + stats.reservations + stats.copies_under_way > 0) {
    return Fail("something is still under way when all has ended");
  }
  pages_.Conclude();
  upkeep_.Conclude();
  CheckWrittenAgain();
  CheckMemoryIsFree();
}

void Driver::CheckMemoryIsFree() {
  for (const auto& [tenant, key] : history_.pinned_prefixes) cache().retention().Unpin(tenant, key);
  for (const TenantId tenant : {1, 2}) {
    for (uint64_t text = 1; text <= kTexts; ++text) cache().retention().Unpin(tenant, Plans().at({tenant, text}).key);
    const SessionId last = clients_.next_session + (TenantOf(clients_.next_session) == tenant ? 0 : 1);
    cache().OpenSession(last, tenant);
    ObjectHeader all{.kind = ObjectKind::kSegment, .bytes = world_.TopExtents() * limits::kExtentBytes};
    const bool granted = cache().Reserve(last, all).outcome == ReserveOutcome::kGranted;
    if (!granted && world_.observer.memory_refusals == 0) Fail("memory is lost");
    cache().CloseSession(last, [] {});
  }
}

}  // namespace ashlar::simulation
