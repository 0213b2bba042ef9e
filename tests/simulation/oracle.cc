// SPDX-License-Identifier: Apache-2.0
// The oracle: checks the cache's promises after each step.
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/simulation/driver.h"

namespace ashlar::simulation {
namespace {

constexpr uint64_t kMostPassed = 2;  // pieces: one of the other tenant, and one of all

// Extents of a match's prefix objects that are not among `seen`.
uint64_t ExtentsOf(const Match& match, std::set<const ObjectHeader*>& seen) {
  uint64_t extents = 0;
  match.prefix.objects.ForEach([&](uint32_t object) {
    const ObjectHeader* const header = match.found[object].header;
    if (seen.insert(header).second) extents += header->Extents();
  });
  return extents;
}

}  // namespace

// Promise 3: a refusal for lack of space is due to what others hold.
void Driver::CheckSpace(TenantId tenant, uint64_t extents) {
  if (SomethingEnds()) return;                               // it releases its space in a moment
  if (cache().upkeep().scrubber().report().running) return;  // it holds a copy for a moment
  if (cache().stats().copies_under_way > 0 || cache().stats().landings > 0) return;  // they hold for a moment
  if (world_.observer.memory_refusals > 0) return;  // the simulating machine has no memory left itself
  const auto of_tenant = [tenant](const auto& item) { return TenantOf(item.second.session) == tenant; };
  if (!compositions_.empty() || std::ranges::any_of(commits_, of_tenant) || !pinned_prefixes_.empty()) return;
  std::set<Text> held;
  uint64_t used = 0;
  std::set<const ObjectHeader*> prefixes;
  for (const Lease& lease : leases_) {
    if (TenantOf(lease.session) != tenant) continue;
    if (lease.asked) used += ExtentsOf(lease.asked->match, prefixes);
    for (const Text& text : lease.texts) {
      for (const Text& part : BundleOf(text)) held.insert(part);
    }
  }
  for (const auto& [text, until] : pins_) {
    if (text.first == tenant) held.insert(text);
  }
  for (const Text& text : held) used += Plans().at(text).Extents();
  for (const Reservation& reservation : reservations_) {
    if (reservation.text.first == tenant) used += Plans().at(reservation.text).Extents();
  }
  // A text that was dropped under a lease and published again exists twice: count it twice.
  if (2 * used + extents <= world_.TopExtents()) Fail("space that no session holds was refused");
}

void Driver::CheckHit(const Text& text, const Found& found, std::optional<Nanos> used) {
  for (const Text& part : BundleOf(text)) {
    if (!published_.contains(part)) Fail("found what its tenant never published");
  }
  if (!IsOf(*found.header, text)) Fail("found another text's object");
  if (found.slot->Extents() != Plans().at(text).Extents()) Fail("found an object of another size");
  if (used) CheckUse(text, used);
}

// A lookup that began before keeps what it had found by then, as do leases, and sessions that attach to them.
void Driver::CheckNotErased(const Text& text, uint64_t begun_at_step) {
  for (const Text& part : BundleOf(text)) {
    const auto erased = erased_.find(part);
    if (erased != erased_.end() && erased->second <= begun_at_step) Fail("found what was erased");
  }
}

// An offer of an existing object counts as a use, unless the object could not be promoted.
void Driver::CheckUse(const Text& text, std::optional<Nanos> used) {
  if (IsPast(used_, text) && !InUse(text)) Fail("found after its time to live");
  for (const Text& part : BundleOf(text)) {
    used_[part] = world_.clock.Now();
    if (used) surely_used_[part] = std::max(surely_used_[part], *used);
  }
}

// Unused for longer than its tenant's time to live.
bool Driver::IsPast(const std::map<Text, Nanos>& used, const Text& text) const {
  const auto last = used.find(text);
  return text.first == kExpiringTenant && world_.sizes.ttl > 0 && last != used.end() &&
         world_.clock.Now() - last->second >= world_.sizes.ttl;
}

// Returns whether a session may hold the text or a shard of it: then it does not expire.
bool Driver::InUse(const Text& text) {
  // A session or lease that has ended may hold anything until the last slice of its end.
  if (ticks_ || !releasing_.empty() || !closing_.empty()) return true;
  const std::vector<Text> bundle = BundleOf(text);
  const auto names = [&](const std::vector<Text>& texts) {
    return std::ranges::any_of(texts, [&](const Text& each) { return std::ranges::count(bundle, each) > 0; });
  };
  const auto names_it = [&](const auto& item) { return names(item.second.texts); };
  const auto found_it = [&](const Searching& each) { return each.begun_at_step < report_.step && names(each.texts); };
  return Leased(text) || std::ranges::any_of(searches_, found_it) || std::ranges::any_of(landings_, names_it) ||
         std::ranges::any_of(compositions_, names_it) ||
         std::ranges::any_of(pins_, [&](const auto& pin) { return std::ranges::count(bundle, pin.first) > 0; });
}

// An object that was dropped under its lease, and published again since, is a different object.
bool Driver::Leased(const Text& text) {
  for (const Lease& lease : leases_) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
    for (const Found& found : held.ok() ? held->found : std::vector<Found>{}) {
      // A lease of one shard is one of all.
      if (found.header != nullptr && found.header->key == Plans().at(text).key) return true;
    }
  }
  return false;
}

void Driver::CheckMiss(const Text& text, MissReason reason, Nanos recompute) {
  switch (reason) {
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kAbandoned:
    case MissReason::kBudgetRefused:
      break;
    case MissReason::kEvicted:
      if (Leased(text) && !operator_evicted_.contains(text)) Fail("leased data was evicted");
      break;
    case MissReason::kExpired: {
      const std::vector<Text> bundle = BundleOf(text);
      const bool past = std::ranges::any_of(bundle, [this](const Text& part) { return IsPast(surely_used_, part); });
      if (!past) Fail("expired before its time");
      Reach(Event::kExpired);
      break;
    }
    case MissReason::kChecksumFailed:
      if (!Corrupted(text.first)) Fail("a copy is corrupt, and nothing corrupted it");
      break;
    case MissReason::kSlowerThanRecompute:
      if (recompute == 0) Fail("a hit was slower than recompute without a compute time");
      break;
    case MissReason::kDaemonUnavailable:
      if (!drains_) Fail("a cache that does not drain is unavailable");
      break;
    case MissReason::kDeclined:
      if (!declined_.contains(text)) Fail("declined, but no session offered it");
      break;
    case MissReason::kTierError:
      if (!TierFailed()) Fail("a tier error that no tier had");
      break;
    default:
      Fail(absl::StrCat("a miss for no good reason: ", std::string(Name(reason))));
  }
}

// A session's publishes renew its other reservations, up to ten times the usual.
Nanos Driver::DeadlineOf(const Reservation& reservation) const {
  const auto progress = progress_.find(reservation.session);
  const Nanos since = progress == progress_.end() ? 0 : progress->second;
  return std::max(reservation.reserved_at, std::min(since, reservation.reserved_at + 9 * kDeadline)) + kDeadline;
}

bool Driver::SomethingIsOverdue() {
  const Nanos now = world_.clock.Now();
  return std::ranges::any_of(leases_, [now](const Lease& lease) { return lease.deadline && *lease.deadline <= now; }) ||
         std::ranges::any_of(reservations_,
                             [&](const Reservation& r) { return !r.publishing && DeadlineOf(r) <= now; }) ||
         std::ranges::any_of(Plans(), [this](const auto& item) { return IsThereTooLong(item.first); });
}

bool Driver::IsThereTooLong(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return IsPast(used_, text) && !cache().upkeep().inventory().Where(text.first, plan.key, plan.shard).empty() &&
         !InUse(text);
}

// After a tick, exactly the overdue items have ended.
void Driver::CheckDeadlines() {
  const Nanos now = world_.clock.Now();
  std::erase_if(leases_, [&](const Lease& lease) {
    const bool due = lease.deadline && *lease.deadline <= now;
    const bool held = cache().Held(lease.session, lease.id).ok();
    if (held == due) Fail(due ? "a lease outlives its deadline" : "a lease is gone that no session ended");
    return due;
  });
  std::erase_if(reservations_, [&](const Reservation& reservation) {
    const bool due = !reservation.publishing && DeadlineOf(reservation) <= now;
    const bool there = cache().Planned(reservation.session, reservation.id) != nullptr;
    if (there == due) Fail(due ? "a reservation outlives its deadline" : "a reservation is gone that no session ended");
    return due;
  });
  std::erase_if(pins_, [now](const auto& pin) { return pin.second <= now; });
}

void Driver::CheckExpired() {
  const auto too_long = [this](const auto& item) { return IsThereTooLong(item.first); };
  if (std::ranges::any_of(Plans(), too_long)) Fail("kept after its time to live");
}

void Driver::Note(Fault fault) {
  const bool states[kStates] = {
      !leases_.empty(),
      !reservations_.empty(),
      std::ranges::any_of(reservations_, &Reservation::publishing),
      !landings_.empty(),
      cache().stats().copies_under_way > 0,
      draining_ > 0,
      !commits_.empty(),
      std::ranges::any_of(commits_, [](const auto& item) { return item.second.spanning; }),
      !compositions_.empty(),
      !requests_.empty(),
      !fillings_.empty(),
      SomethingIsOverdue(),
      drains_,
  };
  for (size_t state = 0; state < kStates; ++state) {
    report_.coverage.pairs[static_cast<size_t>(fault)][state] += states[state] ? 1 : 0;
  }
}

void Driver::NoteFaults() {
  const storage::SimulatedDisk::Counts now = world_.disk.counts();
  const std::tuple<Fault, uint64_t, uint64_t> struck[] = {
      {Fault::kReadError, now.read_errors, seen_.read_errors},
      {Fault::kWriteError, now.write_errors, seen_.write_errors},
      {Fault::kSyncError, now.sync_errors, seen_.sync_errors},
      {Fault::kRecordError, now.batch_errors, seen_.batch_errors},
      {Fault::kBitFlip, now.bit_flips, seen_.bit_flips},
      {Fault::kDiskFull, now.refused_full, seen_.refused_full},
      {Fault::kNoSpace, now.short_writes, seen_.short_writes},
      {Fault::kQueueFull, world_.executor.refused() + world_.io.refused(), seen_refused_},
  };
  for (const auto& [fault, count, before] : struck) {
    if (count > before) Note(fault);
  }
  seen_ = now;
  seen_refused_ = world_.executor.refused() + world_.io.refused();
}

// Promise 4.
void Driver::CheckBudgets() {
  for (const TenantId tenant : {1, 2}) {
    const auto check = [&](const storage::Tier& tier, uint64_t extents, absl::string_view name) {
      if (tier.Usage(tenant).used_bytes > extents * limits::kExtentBytes) Fail(absl::StrCat(name, ": over its budget"));
    };
    if (world_.hbm != nullptr) check(*world_.hbm, world_.sizes.hbm, "hbm");
    check(*world_.dram, world_.sizes.dram, "dram");
    check(*world_.ssd, world_.sizes.ssd, "ssd");
  }
}

// Promises 2 and 3: leased objects are disjoint, in memory of their own tenant, and unchanged.
void Driver::CheckLeases() {
  std::set<const storage::Slot*> slots;
  std::set<std::pair<uint32_t, uint32_t>> extents;
  for (const Lease& lease : leases_) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
    if (!held.ok()) return Fail("a lease is gone that no session ended");
    for (const Found& found : held->found) {
      if (found.reason != MissReason::kNone || !slots.insert(found.slot).second) continue;
      for (const ExtentRun& run : found.slot->runs) {
        const auto [owner, fresh] = arena_tenants_.emplace(run.arena, TenantOf(lease.session));
        if (owner->second != TenantOf(lease.session)) return Fail("memory of one tenant holds another one's object");
        for (uint32_t i = 0; i < run.count; ++i) {
          if (!extents.emplace(run.arena, run.first + i).second) return Fail("two leased objects share memory");
        }
      }
      const ObjectHeader& header = *found.header;
      const storage::Query query{.kind = header.kind, .key = header.key, .shard = header.shard};
      if (cache().explainer().Explain(TenantOf(lease.session), query).reason != MissReason::kNone) {
        return Fail("a leased object, or another shard of it, is gone");
      }
      // Only whole copies are checked: a failed read leaves wrong bytes in a copy that is being promoted.
      const std::vector<TierKind> whole =
          cache().upkeep().inventory().Where(TenantOf(lease.session), found.header->key, found.header->shard);
      if (whole.empty() || whole.front() != world_.top().kind() || Corrupted(TenantOf(lease.session))) continue;
      const ExtentRun& first = found.slot->runs.front();
      const std::string encoded = EncodeHeader(header);
      const std::byte* there = world_.top().Address(first.arena, first.first);
      if (std::memcmp(there, encoded.data(), encoded.size()) != 0) return Fail("a leased object's header changed");
    }
  }
}

// Landings and compositions.
uint64_t Driver::InFlight(TenantId tenant) const {
  const auto of_tenant = [tenant](const auto& item) { return TenantOf(item.second.session) == tenant; };
  return static_cast<uint64_t>(std::ranges::count_if(landings_, of_tenant) +
                               std::ranges::count_if(compositions_, of_tenant));
}

// Independent of the work that other tenants have in flight.
bool Driver::MayBegin(TenantId tenant) const {
  return world_.executor.refused() == 0 && InFlight(tenant) < world_.sizes.in_flight;
}

// No tenant has more in flight than allowed, nor waits for more than its share.
void Driver::CheckTurns() {
  for (const TenantId tenant : {1, 2}) {
    if (InFlight(tenant) > world_.sizes.in_flight) Fail("a tenant has more in flight than it may");
  }
  if (std::max(world_.executor.most_passed(), world_.io.most_passed()) > kMostPassed) {
    Fail("a tenant waits, and others are served");
  }
}

constexpr int kMostWorkLeft = 10000;  // pieces, of what can be in flight at once

void Driver::RunAll() {
  // Memory before the disk, as long as that takes: work that only waits for the disk must not keep memory busy.
  for (int work = 0; world_.executor.pending() + world_.io.pending() > 0; ++work) {
    if (work == kMostWorkLeft) return Fail("copies are made for ever, of what waits for the disk");
    (world_.executor.pending() > 0 ? world_.executor : world_.io).Proceed(0, false);
  }
}

// The disk has been healthy for a while, and ticks have passed: everything that it has space for is written.
void Driver::CheckWrittenAgain() {
  if (world_.ssd->health().degraded()) return Fail("a disk that is well again is not written");
  cache().offers().StartDrain();
  RunAll();
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
  EndSlices();
  cache().offers().EndDrain();
  world_.disk.set_faults({});
  world_.io.Hang(false);
  world_.executor.set_capacity(1024);
  world_.io.set_capacity(1024);
  for (const SessionId session : sessions_) {
    for (auto& [number, landing] : landings_) landing.cancelled = true;
    for (auto& [number, composition] : compositions_) composition.cancelled = true;
    EndRequestsOf(session);
    ++draining_;
    cache().CloseSession(session, [this] { --draining_; });
  }
  leases_.clear();
  for (int round = 0; round < 3; ++round) {
    RunAll();
    if (!report_.failure.empty()) return;
    world_.clock.Advance(2 * kDeadline);
    cache().Tick();
  }
  const Cache::Stats stats = cache().stats();
  const bool answered = landings_.empty() && compositions_.empty() && commits_.empty() && searches_.empty();
  if (!answered || draining_ > 0) return Fail("a call was never answered");
  if (stats.landings + stats.compositions + stats.leases + stats.reservations + stats.copies_under_way > 0) {
    return Fail("something is still under way when all has ended");
  }
  ConcludePages();
  ConcludeUpkeep();
  CheckWrittenAgain();
  for (const auto& [tenant, key] : pinned_prefixes_) cache().retention().Unpin(tenant, key);
  for (const TenantId tenant : {1, 2}) {
    for (uint64_t text = 1; text <= kTexts; ++text) cache().retention().Unpin(tenant, Plans().at({tenant, text}).key);
    const SessionId last = next_session_ + (TenantOf(next_session_) == tenant ? 0 : 1);
    cache().OpenSession(last, tenant);
    ObjectHeader all{.kind = ObjectKind::kSegment, .bytes = world_.TopExtents() * limits::kExtentBytes};
    const bool granted = cache().Reserve(last, all).outcome == ReserveOutcome::kGranted;
    if (!granted && world_.observer.memory_refusals == 0) Fail("memory is lost");
    cache().CloseSession(last, [] {});
  }
}

}  // namespace ashlar::simulation
