// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/oracle.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

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
void Oracle::CheckSpace(TenantId tenant, uint64_t extents) {
  if (clients_.SomethingEnds()) return;                      // it releases its space in a moment
  if (cache().upkeep().scrubber().report().running) return;  // it holds a copy for a moment
  if (cache().stats().copies_under_way > 0 || cache().stats().landings > 0) return;  // they hold for a moment
  if (world_.observer.memory_refusals > 0) return;  // the simulating machine has no memory left itself
  const auto of_tenant = [tenant](const auto& item) { return TenantOf(item.second.session) == tenant; };
  if (!clients_.compositions.empty() || std::ranges::any_of(clients_.commits, of_tenant) ||
      !history_.pinned_prefixes.empty())
    return;
  std::set<Text> held;
  uint64_t used = 0;
  std::set<const ObjectHeader*> prefixes;
  for (const Lease& lease : clients_.leases) {
    if (TenantOf(lease.session) != tenant) continue;
    if (lease.asked) used += ExtentsOf(lease.asked->match, prefixes);
    for (const Text& text : lease.texts) {
      for (const Text& part : BundleOf(text)) held.insert(part);
    }
  }
  for (const auto& [text, until] : history_.pins) {
    if (text.first == tenant) held.insert(text);
  }
  for (const Text& text : held) used += Plans().at(text).Extents();
  for (const Reservation& reservation : clients_.reservations) {
    if (reservation.text.first == tenant) used += Plans().at(reservation.text).Extents();
  }
  // A text that was dropped under a lease and published again exists twice: count it twice.
  if (2 * used + extents <= world_.TopExtents()) Fail("space that no session holds was refused");
}

void Oracle::CheckHit(const Text& text, const Found& found, std::optional<Nanos> used) {
  for (const Text& part : BundleOf(text)) {
    if (!history_.published.contains(part)) Fail("found what its tenant never published");
  }
  if (!IsOf(*found.header, text)) Fail("found another text's object");
  if (found.slot->Extents() != Plans().at(text).Extents()) Fail("found an object of another size");
  if (used) CheckUse(text, used);
}

// A lookup that began before keeps what it had found by then, as do leases, and sessions that attach to them.
void Oracle::CheckNotErased(const Text& text, uint64_t begun_at_step) {
  for (const Text& part : BundleOf(text)) {
    const auto erased = history_.erased.find(part);
    if (erased != history_.erased.end() && erased->second <= begun_at_step) Fail("found what was erased");
  }
}

bool Oracle::IsThere(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return !cache().upkeep().inventory().Where(text.first, plan.key, plan.shard).empty();
}

// What was acknowledged as erased does not return, with or without a crash.
void Oracle::CheckErased() {
  for (const auto& [text, step] : history_.erased) {
    if (IsThere(text)) return Fail("what was erased is there again");
  }
}

// An offer of an existing object counts as a use, unless the object could not be promoted.
void Oracle::CheckUse(const Text& text, std::optional<Nanos> used) {
  if (IsPast(history_.used, text) && !InUse(text)) Fail("found after its time to live");
  for (const Text& part : BundleOf(text)) {
    history_.used[part] = world_.clock.Now();
    if (used) history_.surely_used[part] = std::max(history_.surely_used[part], *used);
  }
}

// Unused for longer than its tenant's time to live.
bool Oracle::IsPast(const std::map<Text, Nanos>& used, const Text& text) const {
  const auto last = used.find(text);
  return text.first == kExpiringTenant && world_.sizes.ttl > 0 && last != used.end() &&
         world_.clock.Now() - last->second >= world_.sizes.ttl;
}

// Returns whether a session may hold the text or a shard of it: then it does not expire.
bool Oracle::InUse(const Text& text) {
  // A session or lease that has ended may hold anything until the last slice of its end.
  if (clients_.ticks || !clients_.releasing.empty() || !clients_.closing.empty()) return true;
  const std::vector<Text> bundle = BundleOf(text);
  const auto names = [&](const std::vector<Text>& texts) {
    return std::ranges::any_of(texts, [&](const Text& each) { return std::ranges::count(bundle, each) > 0; });
  };
  const auto names_it = [&](const auto& item) { return names(item.second.texts); };
  const auto found_it = [&](const Searching& each) { return each.begun_at_step < report_.step && names(each.texts); };
  return Leased(text) || std::ranges::any_of(clients_.searches, found_it) ||
         std::ranges::any_of(clients_.landings, names_it) || std::ranges::any_of(clients_.compositions, names_it) ||
         std::ranges::any_of(history_.pins, [&](const auto& pin) { return std::ranges::count(bundle, pin.first) > 0; });
}

// An object that was dropped under its lease, and published again since, is a different object.
bool Oracle::Leased(const Text& text) {
  for (const Lease& lease : clients_.leases) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
    for (const Found& found : held.ok() ? held->found : std::vector<Found>{}) {
      // A lease of one shard is one of all.
      if (found.header != nullptr && found.header->key == Plans().at(text).key) return true;
    }
  }
  return false;
}

void Oracle::CheckMiss(const Text& text, MissReason reason, Nanos recompute) {
  switch (reason) {
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kAbandoned:
    case MissReason::kBudgetRefused:
      break;
    case MissReason::kEvicted:
      if (Leased(text) && !history_.operator_evicted.contains(text)) Fail("leased data was evicted");
      break;
    case MissReason::kExpired: {
      const std::vector<Text> bundle = BundleOf(text);
      const bool past =
          std::ranges::any_of(bundle, [this](const Text& part) { return IsPast(history_.surely_used, part); });
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
      if (!history_.drains) Fail("a cache that does not drain is unavailable");
      break;
    case MissReason::kDeclined:
      if (!history_.declined.contains(text)) Fail("declined, but no session offered it");
      break;
    case MissReason::kTierError:
      if (!TierFailed()) Fail("a tier error that no tier had");
      break;
    default:
      Fail(absl::StrCat("a miss for no good reason: ", std::string(Name(reason))));
  }
}

// A session's publishes renew its other reservations, up to ten times the usual.
Nanos Oracle::DeadlineOf(const Reservation& reservation) const {
  const auto progress = clients_.progress.find(reservation.session);
  const Nanos since = progress == clients_.progress.end() ? 0 : progress->second;
  return std::max(reservation.reserved_at, std::min(since, reservation.reserved_at + 9 * kDeadline)) + kDeadline;
}

bool Oracle::SomethingIsOverdue() {
  const Nanos now = world_.clock.Now();
  return std::ranges::any_of(clients_.leases,
                             [now](const Lease& lease) { return lease.deadline && *lease.deadline <= now; }) ||
         std::ranges::any_of(clients_.reservations,
                             [&](const Reservation& r) { return !r.publishing && DeadlineOf(r) <= now; }) ||
         std::ranges::any_of(Plans(), [this](const auto& item) { return IsThereTooLong(item.first); });
}

bool Oracle::IsThereTooLong(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return IsPast(history_.used, text) && !cache().upkeep().inventory().Where(text.first, plan.key, plan.shard).empty() &&
         !InUse(text);
}

// After a tick, exactly the overdue items have ended.
void Oracle::CheckDeadlines() {
  const Nanos now = world_.clock.Now();
  std::erase_if(clients_.leases, [&](const Lease& lease) {
    const bool due = lease.deadline && *lease.deadline <= now;
    const bool held = cache().Held(lease.session, lease.id).ok();
    if (held == due) Fail(due ? "a lease outlives its deadline" : "a lease is gone that no session ended");
    return due;
  });
  std::erase_if(clients_.reservations, [&](const Reservation& reservation) {
    const bool due = !reservation.publishing && DeadlineOf(reservation) <= now;
    const bool there = cache().Planned(reservation.session, reservation.id) != nullptr;
    if (there == due) Fail(due ? "a reservation outlives its deadline" : "a reservation is gone that no session ended");
    return due;
  });
  std::erase_if(history_.pins, [now](const auto& pin) { return pin.second <= now; });
}

void Oracle::CheckExpired() {
  const auto too_long = [this](const auto& item) { return IsThereTooLong(item.first); };
  if (std::ranges::any_of(Plans(), too_long)) Fail("kept after its time to live");
}

// Promise 4.
void Oracle::CheckBudgets() {
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
void Oracle::CheckLeases() {
  std::set<const storage::Slot*> slots;
  std::set<std::pair<uint32_t, uint32_t>> extents;
  for (const Lease& lease : clients_.leases) {
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

// Independent of the work that other tenants have in flight.
bool Oracle::MayBegin(TenantId tenant) const {
  return world_.executor.refused() == 0 && clients_.InFlight(tenant) < world_.sizes.in_flight;
}

// No tenant has more in flight than allowed, nor waits for more than its share.
void Oracle::CheckTurns() {
  for (const TenantId tenant : {1, 2}) {
    if (clients_.InFlight(tenant) > world_.sizes.in_flight) Fail("a tenant has more in flight than it may");
  }
  if (std::max(world_.executor.most_passed(), world_.io.most_passed()) > kMostPassed) {
    Fail("a tenant waits, and others are served");
  }
}

}  // namespace ashlar::simulation
