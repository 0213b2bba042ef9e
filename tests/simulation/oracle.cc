// What must hold: the promises, checked as each step shows them.
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/simulation/driver.h"

namespace ashlar::simulation {

// Promise 3: who is refused for want of room is refused because of what others hold.
void Driver::CheckRoom(TenantId tenant, uint64_t extents) {
  if (cache().stats().copies_under_way > 0 || cache().stats().landings > 0) return;  // they hold for a moment
  if (world_.observer.memory_refusals > 0) return;  // the machine that simulates has no memory left itself
  std::set<Text> held;
  for (const Lease& lease : leases_) {
    if (TenantOf(lease.session) != tenant) continue;
    for (const Text& text : lease.texts) {
      for (const Text& part : BundleOf(text)) held.insert(part);
    }
  }
  for (const auto& [text, until] : pins_) {
    if (text.first == tenant && until > world_.clock.Now()) held.insert(text);
  }
  uint64_t used = 0;
  for (const Text& text : held) used += plans_.at(text).Extents();
  for (const Reservation& reservation : reservations_) {
    if (reservation.text.first == tenant) used += plans_.at(reservation.text).Extents();
  }
  // A text that was dropped under a lease and published again stands there twice: count it so.
  if (2 * used + extents <= world_.TopExtents()) Fail("room that nobody holds was refused");
}

void Driver::CheckHit(const Text& text, const Found& found) {
  for (const Text& part : BundleOf(text)) {
    if (!published_.contains(part)) Fail("found what its tenant never published");
  }
  if (!IsOf(*found.header, text)) Fail("found another text's object");
  if (found.slot->Extents() != plans_.at(text).Extents()) Fail("found an object of another size");
}

// One that was dropped under its lease, and published again since, is another object.
bool Driver::Leased(const Text& text) {
  for (const Lease& lease : leases_) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
    for (const Found& found : held.ok() ? held->found : std::vector<Found>{}) {
      // A lease of one shard is one of all.
      if (found.header != nullptr && found.header->key == plans_.at(text).key) return true;
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
    case MissReason::kChecksumFailed:
      if (!Corrupted()) Fail("a copy is corrupt, and nothing corrupted it");
      break;
    case MissReason::kTooDear:
      if (recompute == 0) Fail("a hit was too dear, and nobody said what computing takes");
      break;
    case MissReason::kDaemonUnavailable:
      if (!drains_) Fail("a cache that does not drain is unavailable");
      break;
    case MissReason::kDeclined:
      if (!declined_.contains(text)) Fail("declined, and nobody offered it");
      break;
    case MissReason::kTierError:
      if (!TierFailed()) Fail("a tier error that no tier had");
      break;
    default:
      Fail(absl::StrCat("a miss for no good reason: ", std::string(Name(reason))));
  }
}

void Driver::Note(Fault fault) {
  const bool states[kStates] = {
      !leases_.empty(),
      !reservations_.empty(),
      std::ranges::any_of(reservations_, &Reservation::publishing),
      !landings_.empty(),
      cache().stats().copies_under_way > 0,
      draining_ > 0,
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

// Promises 2 and 3: leased objects lie apart, in memory of their tenant's own, and say what they said.
void Driver::CheckLeases() {
  std::set<const storage::Slot*> slots;
  std::set<std::pair<uint32_t, uint32_t>> extents;
  for (const Lease& lease : leases_) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
    if (!held.ok()) return Fail("a lease is gone that nobody ended");
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
      if (cache().Explain(TenantOf(lease.session), {&query, 1})[0].reason != MissReason::kNone) {
        return Fail("a leased object, or another shard of it, is gone");
      }
      // A read that fails leaves rubbish in a copy that is on its way up.
      const std::vector<TierKind> whole =
          cache().Where(TenantOf(lease.session), found.header->key, found.header->shard);
      if (whole.empty() || whole.front() != world_.top().kind() || Corrupted()) continue;
      const ExtentRun& first = found.slot->runs.front();
      const std::string encoded = EncodeHeader(header);
      const std::byte* there = world_.top().Address(first.arena, first.first);
      if (std::memcmp(there, encoded.data(), encoded.size()) != 0) return Fail("a leased object's header changed");
    }
  }
}

constexpr int kMostWorkLeft = 10000;  // pieces, of what can be under way at once

// Everything ends; then nothing is held, and everybody has all of his room.
void Driver::Conclude() {
  cache().EndDrain();
  world_.disk.set_faults({});
  world_.executor.set_capacity(1024);
  world_.io.set_capacity(1024);
  for (const SessionId session : sessions_) {
    for (auto& [number, landing] : landings_) landing.cancelled = true;
    ++draining_;
    cache().CloseSession(session, [this] { --draining_; });
  }
  leases_.clear();
  for (int round = 0; round < 3; ++round) {
    // Memory before the disk, as long as that takes: whoever only waits for the disk must not keep memory busy.
    for (int work = 0; world_.executor.pending() + world_.io.pending() > 0; ++work) {
      if (work == kMostWorkLeft) return Fail("copies are made for ever, of what waits for the disk");
      (world_.executor.pending() > 0 ? world_.executor : world_.io).Complete(0, false);
    }
    world_.clock.Advance(2 * kDeadline);
    cache().Tick();
  }
  const Cache::Stats stats = cache().stats();
  if (!landings_.empty() || draining_ > 0) return Fail("a call was never answered");
  if (stats.landings + stats.leases + stats.reservations + stats.copies_under_way > 0) {
    return Fail("something is still under way when all has ended");
  }
  for (const TenantId tenant : {1, 2}) {
    for (uint64_t text = 1; text <= kTexts; ++text) cache().Unpin(tenant, plans_.at({tenant, text}).key);
    const SessionId last = next_session_ + (TenantOf(next_session_) == tenant ? 0 : 1);
    cache().OpenSession(last, tenant);
    ObjectHeader all{.kind = ObjectKind::kSegment, .bytes = world_.TopExtents() * limits::kExtentBytes};
    const bool granted = cache().Reserve(last, all).outcome == ReserveOutcome::kGranted;
    if (!granted && world_.observer.memory_refusals == 0) Fail("memory is lost");
    cache().CloseSession(last, [] {});
  }
}

}  // namespace ashlar::simulation
