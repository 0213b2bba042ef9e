// What happens: one call, fault or completion a step.
#include "tests/simulation/driver.h"

#include <iterator>

namespace ashlar::simulation {
namespace {

constexpr uint64_t kPosition = 5;  // at which segments are landed

// What an engine publishes. Most engines share memory, for filling it takes longer than to publish from it; every
// eighth one has memory of its own, which is gone when nobody keeps it.
storage::PublishSource Source(const Text& text, uint64_t publish) {
  static const auto* const shared = [] {
    auto* sources = new std::map<Text, storage::PublishSource>;
    for (const auto& [each, plan] : Plans()) sources->emplace(each, storage::TestSource(plan, each.second));
    return sources;
  }();
  return publish % 8 == 0 ? storage::TestSource(Plans().at(text), text.second) : shared->at(text);
}

}  // namespace

const std::map<Text, ObjectHeader>& Plans() {
  static const auto* const plans = [] {
    auto* all = new std::map<Text, ObjectHeader>;
    for (TenantId tenant = 1; tenant <= kTenants; ++tenant) {
      for (uint64_t text = 1; text <= kTexts; ++text) {
        all->emplace(Text(tenant, text), storage::TestPlan(text, 20 + 40 * text, ObjectKind::kSegment, tenant));
      }
      for (const uint64_t text : kBundle) {
        ObjectHeader& part = all->at({tenant, text});
        part.key = all->at({tenant, kBundle[0]}).key;
        part.shard = {.rank = static_cast<uint32_t>(text - kBundle[0]), .size = std::size(kBundle)};
      }
    }
    return all;
  }();
  return *plans;
}

void Driver::Step() {
  const uint64_t choice = world_.Draw(1000);
  Trace(choice);
  if (choice < 130) {
    Reserve();
  } else if (choice < 260) {
    Publish();
  } else if (choice < 280) {
    Abandon();
  } else if (choice < 420) {
    Lookup();
  } else if (choice < 430) {
    Attach();
  } else if (choice < 490) {
    Release();
  } else if (choice < 570) {
    Land();
  } else if (choice < 580) {
    Quiesce();
  } else if (choice < 600) {
    Die();
  } else if (choice < 620) {
    Tick();
  } else if (choice < 650) {
    SetFaults();
  } else if (choice < 655) {
    Crash();
  } else if (choice < 665) {
    Operate();
  } else {
    Execute();
  }
}

void Driver::Reserve() {
  const SessionId session = AnySession();
  const Text text = AnyText(TenantOf(session));
  const ObjectHeader& plan = plans_.at(text);
  const auto pool = world_.Draw(4) == 0 ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic;
  const Nanos recompute = AnyRecompute();
  const Cache::Reservation reservation = cache().Reserve(session, plan, {}, pool, recompute);
  Trace(static_cast<uint64_t>(reservation.outcome));
  if (reservation.outcome == ReserveOutcome::kGranted) reservations_.push_back({session, reservation.id, text});
  if (reservation.outcome == ReserveOutcome::kNoSpace) CheckRoom(text.first, plan.Extents());
  if ((reservation.outcome == ReserveOutcome::kUnavailable) != drains_)
    Fail("a cache that drains reserves, or another not");
  if (reservation.outcome == ReserveOutcome::kDeclined) {
    if (recompute == 0) Fail("a reservation was declined, and nobody said what computing takes");
    for (const Text& part : BundleOf(text)) declined_.insert(part);
  }
}

void Driver::Publish() {
  if (reservations_.empty()) return;
  Reservation& reservation = reservations_[world_.Draw(reservations_.size())];
  if (reservation.publishing) return;
  reservation.publishing = true;
  const SessionId session = reservation.session;
  const storage::ReservationId id = reservation.id;
  cache().Publish(session, id, Source(reservation.text, publishes_++),
                  [this, session, id](PublishOutcome outcome) { Published(session, id, outcome); });
}

void Driver::Published(SessionId session, storage::ReservationId id, PublishOutcome outcome) {
  Trace(static_cast<uint64_t>(outcome));
  const auto found = std::ranges::find_if(reservations_, [&](const Reservation& reservation) {
    return reservation.session == session && reservation.id == id;
  });
  if (found == reservations_.end()) return Fail("a publish was answered twice, or was never asked for");
  if (outcome == PublishOutcome::kPublished) published_.insert(found->text);
  if (outcome == PublishOutcome::kBusy) {
    found->publishing = false;
  } else {
    reservations_.erase(found);
  }
}

void Driver::Abandon() {
  if (reservations_.empty()) return;
  const size_t i = world_.Draw(reservations_.size());
  if (reservations_[i].publishing) return;
  cache().Abandon(reservations_[i].session, reservations_[i].id);
  reservations_.erase(reservations_.begin() + static_cast<ptrdiff_t>(i));
}

void Driver::Lookup() {
  const SessionId session = AnySession();
  Lease lease{.session = session};
  std::vector<storage::Query> queries;
  for (uint64_t n = 1 + world_.Draw(3); n > 0; --n) {
    const Text text = AnyText(TenantOf(session));
    const ObjectHeader& plan = plans_.at(text);
    lease.texts.push_back(text);
    queries.push_back({.kind = plan.kind,
                       .key = plan.key,
                       .shard = plan.shard,
                       .tokens = plan.tokens,
                       .recompute = AnyRecompute(),
                       .needed_at = AnyNeed()});
  }
  const Match match = cache().Lookup(session, queries);
  lease.id = match.lease;
  for (size_t i = 0; i < queries.size(); ++i) {
    const Found& found = match.found[i];
    Trace(static_cast<uint64_t>(found.reason));
    if (drains_ && found.reason != MissReason::kDaemonUnavailable) Fail("a cache that drains is found things in");
    if (found.reason == MissReason::kNone) {
      CheckHit(lease.texts[i], found);
    } else {
      CheckMiss(lease.texts[i], found.reason, queries[i].recompute);
    }
  }
  std::vector<Text> hits;
  for (size_t i = 0; i < queries.size(); ++i) {
    if (match.found[i].reason == MissReason::kNone) hits.push_back(lease.texts[i]);
  }
  lease.texts = std::move(hits);
  if (lease.id != LeaseId{}) leases_.push_back(std::move(lease));
}

// Another process of an engine takes part in what one found, with the same shard or another one.
void Driver::Attach() {
  if (leases_.empty()) return;
  const Lease& first = leases_[world_.Draw(leases_.size())];
  const SessionId session = AnySession();
  const TensorShard shard = plans_.at(AnyText(1)).shard;
  const absl::StatusOr<Match> match = cache().Attach(session, first.id, shard);
  if (!match.ok()) {
    if (TenantOf(session) == TenantOf(first.session)) Fail("a lease is gone that nobody ended");
    return;
  }
  if (TenantOf(session) != TenantOf(first.session)) return Fail("attached to another tenant's lease");
  Lease lease{.session = session, .id = match->lease};
  for (const Found& found : match->found) {
    if (found.reason != MissReason::kNone) continue;
    const auto text = std::ranges::find_if(plans_, [&](const auto& item) {
      return item.first.first == TenantOf(session) && IsOf(*found.header, item.first);
    });
    if (text == plans_.end() || found.header->shard != shard) return Fail("attached to what nobody looked up");
    CheckHit(text->first, found);
    lease.texts.push_back(text->first);
  }
  // What is gone keeps its place as long as any holder of the lease keeps that.
  if (match->lease == first.id) lease.texts = first.texts;
  const bool held = std::ranges::any_of(
      leases_, [&](const Lease& other) { return other.session == session && other.id == match->lease; });
  if (!held) leases_.push_back(std::move(lease));
}

void Driver::Release() {
  if (leases_.empty()) return;
  const size_t i = world_.Draw(leases_.size());
  cache().Release(leases_[i].session, leases_[i].id);
  leases_.erase(leases_.begin() + static_cast<ptrdiff_t>(i));
}

void Driver::Land() {
  if (leases_.empty()) return;
  Lease& lease = leases_[world_.Draw(leases_.size())];
  if (lease.texts.empty()) return;
  const uint64_t number = next_landing_++;
  Landing landing{.session = lease.session, .id = number, .texts = {lease.texts[0]}};
  const uint64_t positions = kPosition + plans_.at(lease.texts[0]).tokens;
  landing.pages = std::make_unique<TestPages>(storage::TestPages::Holding(positions));
  // The match lists misses, too: find the index of the first hit.
  const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
  if (!held.ok()) return Fail("a lease is gone that nobody ended");
  uint32_t index = 0;
  while (held->found[index].header == nullptr || !IsOf(*held->found[index].header, lease.texts[0])) {
    if (++index == held->found.size()) return;  // dropped since: it is described as a miss
  }
  const storage::LandTarget target = storage::TestTarget(*landing.pages, {{index, kPosition}});
  landings_.emplace(number, std::move(landing));
  cache().Land(lease.session, number, lease.id, target,
               {.progress = [](uint32_t) {},
                .done = [this, number](const std::vector<MissReason>& verdict) { Landed(number, verdict); }});
}

void Driver::Landed(uint64_t number, const std::vector<MissReason>& verdict) {
  const auto found = landings_.find(number);
  if (found == landings_.end()) return Fail("a landing was answered twice");
  const Landing landing = std::move(found->second);
  landings_.erase(found);
  Trace(static_cast<uint64_t>(verdict[0]));
  if (verdict[0] == MissReason::kCancelled) {
    if (!landing.cancelled) Fail("a landing was cancelled that nobody gave up");
  } else if (verdict[0] == MissReason::kBusy) {
    if (world_.executor.refused() == 0) Fail("a landing was refused by a queue that had room");
  } else if (verdict[0] != MissReason::kNone) {
    CheckMiss(landing.texts[0], verdict[0]);
  } else {
    if (world_.bug == Bug::kFlipsLandedBits) landing.pages->Key(0, kPosition + 4, 0)[0] += 1;
    const double error =
        storage::LandingError(*landing.pages, plans_.at(landing.texts[0]), landing.texts[0].second, kPosition);
    if (!(error < kTolerance)) Fail("bytes landed are not the bytes published");
  }
}

void Driver::Quiesce() {
  if (landings_.empty()) return;
  auto landing = landings_.begin();
  std::advance(landing, world_.Draw(landings_.size()));
  landing->second.cancelled = true;
  const uint64_t number = landing->first;
  cache().Quiesce(landing->second.session, number, [this, number] {
    if (landings_.contains(number)) Fail("a landing is quiet before its verdict");
  });
}

void Driver::Die() {
  const size_t i = world_.Draw(sessions_.size());
  const SessionId session = sessions_[i];
  Note(Fault::kEngineDeath);
  std::erase_if(leases_, [&](const Lease& lease) { return lease.session == session; });
  std::erase_if(reservations_, [&](const Reservation& r) { return r.session == session && !r.publishing; });
  for (auto& [number, landing] : landings_) landing.cancelled |= landing.session == session;
  ++draining_;
  cache().CloseSession(session, [this, session] {
    --draining_;
    for (const auto& [number, landing] : landings_) {
      if (landing.session == session) Fail("a session is drained before its landing");
    }
  });
  sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i));
  Open();
}

void Driver::Tick() {
  world_.clock.Advance(static_cast<Nanos>(world_.Draw(kDeadline / 3)));
  cache().Tick();
  std::erase_if(leases_, [&](const Lease& lease) { return !cache().Held(lease.session, lease.id).ok(); });
  std::erase_if(reservations_, [&](const Reservation& reservation) {
    return cache().Planned(reservation.session, reservation.id) == nullptr;
  });
}

void Driver::SetFaults() {
  storage::SimulatedDisk::Faults faults;
  const auto rate = [&] { return world_.Draw(3) == 0 ? 0.3 : 0.0; };
  faults.read_error = rate();
  faults.write_error = rate();
  faults.sync_error = rate();
  faults.record_error = rate();
  faults.bit_flip = rate();
  faults.full = world_.Draw(4) == 0;
  if (world_.bug == Bug::kLosesFlushes) faults = {.lost_flush = 1};
  world_.disk.set_faults(faults);
  world_.executor.set_capacity(world_.Draw(3) == 0 ? 2 : 64);
  world_.io.set_capacity(world_.Draw(3) == 0 ? 3 : 64);
}

void Driver::Crash() {
  Note(Fault::kCrash);
  std::vector<Text> durable;
  for (const auto& [text, plan] : plans_) {
    const std::vector<TierKind> tiers = cache().Where(text.first, plan.key, plan.shard);
    if (std::ranges::count(tiers, TierKind::kSsd) > 0) durable.push_back(text);
  }
  leases_.clear();
  reservations_.clear();
  landings_.clear();
  sessions_.clear();
  arena_tenants_.clear();
  pins_.clear();
  draining_ = 0;
  drains_ = false;
  world_.CrashAndRestart();
  for (int i = 0; i < kSessions; ++i) Open();
  for (const Text& text : durable) {
    const ObjectHeader& plan = plans_.at(text);
    const std::vector<TierKind> tiers = cache().Where(text.first, plan.key, plan.shard);
    if (std::ranges::count(tiers, TierKind::kSsd) == 0) Fail("what the disk acknowledged is not there after a crash");
  }
}

void Driver::Operate() {
  const Text text = AnyText(1 + world_.Draw(kTenants));
  const Key& key = plans_.at(text).key;
  if (drains_ || world_.Draw(16) == 0) {
    drains_ = !drains_;
    return drains_ ? cache().StartDrain() : cache().EndDrain();
  }
  switch (world_.Draw(3)) {
    case 0:
      if (!cache().Evict(text.first, key)) break;
      for (const Text& part : BundleOf(text)) operator_evicted_.insert(part);
      break;
    case 1: {
      const Nanos until = world_.clock.Now() + static_cast<Nanos>(world_.Draw(kDeadline));
      if (!cache().Pin(text.first, key, until)) break;
      for (const Text& part : BundleOf(text)) pins_[part] = until;
      break;
    }
    default:
      cache().Unpin(text.first, key);
      for (const Text& part : BundleOf(text)) pins_.erase(part);
  }
}

void Driver::Execute() {
  SimulatedExecutor& executor = world_.Draw(2) == 0 ? world_.executor : world_.io;
  if (executor.pending() == 0) return;
  const bool drop = world_.bug == Bug::kDropsCompletions && world_.Draw(8) == 0;
  executor.Complete(world_.Draw(executor.pending()), drop);
}

}  // namespace ashlar::simulation
