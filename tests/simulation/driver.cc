// SPDX-License-Identifier: Apache-2.0
// The driver's steps: each is one call, fault or completion. This file has the steps on segments and the common ones.
#include "tests/simulation/driver.h"

#include <iterator>

namespace ashlar::simulation {
namespace {

constexpr uint64_t kPosition = 5;  // position at which segments are landed

}  // namespace

Sizes Driver::DrawSizes(uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x5EED);
  constexpr size_t kThreads[] = {1, 2, 4, SIZE_MAX};
  Sizes sizes{.hbm = random() % 3 == 0 ? 10 + random() % 8 : 0, .dram = 12 + random() % 12, .ssd = 16 + random() % 24};
  sizes.threads = kThreads[random() % std::size(kThreads)];
  sizes.in_flight = random() % 2 == 0 ? 1 + random() % 4 : SIZE_MAX;
  sizes.ttl = random() % 2 == 0 ? static_cast<Nanos>(kDeadline / 2 + random() % kDeadline) : 0;
  return sizes;
}

Driver::Driver(uint64_t seed, Bug bug) : world_(seed, DrawSizes(seed), bug) {
  std::mt19937_64 random(seed ^ 0xFEA7);
  features_ = {.prompts = random() % 4 > 0, .compositions = random() % 2 > 0, .pages = random() % 2 > 0};
  features_.slices = random() % 2 > 0;
  const auto add = [this](uint64_t weight, Act act) {
    operations_.push_back({weight, act});
    weight_ += weight;
  };
  add(120, &Driver::Reserve);
  add(120, &Driver::Publish);
  add(20, &Driver::Abandon);
  add(130, &Driver::Lookup);
  add(10, &Driver::Attach);
  add(60, &Driver::Release);
  add(70, &Driver::Land);
  add(10, &Driver::Quiesce);
  add(20, &Driver::Die);
  add(20, &Driver::Advance);
  add(15, &Driver::Tick);
  add(30, &Driver::SetFaults);
  add(5, &Driver::Crash);
  add(10, &Driver::Operate);
  add(6, &Driver::Erase);
  add(12, &Driver::Verify);
  add(335, &Driver::Execute);
  add(4, &Driver::HangDisk);
  if (features_.slices) add(150, &Driver::GoOn);
  if (features_.prompts) add(40, &Driver::CommitText);
  if (features_.prompts) add(3, &Driver::OperateOnPrefix);
  if (features_.compositions) add(30, &Driver::Compose);
  if (features_.pages) {
    for (const TenantId tenant : {1, 2}) regions_.emplace(tenant, Region{TestPages(kRegionPages), nullptr});
    add(4, static_cast<Act>(&Driver::Declare));
    add(20, &Driver::Admit);
    add(8, &Driver::Extend);
    add(35, &Driver::Fill);
    add(12, &Driver::EndRequest);
  }
  for (int i = 0; i < kSessions; ++i) Open();
}

Report Driver::Run(int operations) {
  for (report_.step = 0; static_cast<int>(report_.step) < operations && report_.failure.empty(); ++report_.step) {
    Step();
    NoteFaults();
    CheckBudgets();
    CheckTurns();
    if (report_.step % 16 == 0) CheckLeases();
    if (report_.step % 16 == 8) CheckPages();
  }
  if (report_.failure.empty()) Conclude();
  report_.transitions.counts = world_.copy_transitions;
  return report_;
}

void Driver::Open() {
  sessions_.push_back(next_session_++);
  cache().OpenSession(sessions_.back(), TenantOf(sessions_.back()));
}

void Driver::Step() {
  uint64_t choice = Draw(weight_);
  Trace(choice);
  auto operation = operations_.begin();
  for (; choice >= operation->weight; ++operation) choice -= operation->weight;
  (this->*operation->act)();
}

void Driver::Reserve() {
  const SessionId session = AnySession();
  const Text text = AnyText(TenantOf(session));
  const ObjectHeader& plan = Plans().at(text);
  const auto pool = Draw(4) == 0 ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic;
  const Nanos recompute = AnyRecompute();
  const Cache::Reservation reservation = cache().Reserve(session, plan, {}, pool, recompute);
  Trace(static_cast<uint64_t>(reservation.outcome));
  if (reservation.outcome == ReserveOutcome::kGranted) {
    reservations_.push_back({session, reservation.id, text, world_.clock.Now()});
  }
  if (reservation.outcome == ReserveOutcome::kAlreadyPresent) CheckUse(text, std::nullopt);
  if (reservation.outcome == ReserveOutcome::kNoSpace) CheckSpace(text.first, plan.Extents());
  if ((reservation.outcome == ReserveOutcome::kUnavailable) != drains_)
    Fail("a cache that drains reserves, or another not");
  if (reservation.outcome == ReserveOutcome::kDeclined) {
    if (recompute == 0) Fail("a reservation was declined without a compute time");
    for (const Text& part : BundleOf(text)) declined_.insert(part);
  }
}

void Driver::Publish() {
  if (reservations_.empty()) return;
  Reservation& reservation = *Any(reservations_);
  if (reservation.publishing) return;
  reservation.publishing = true;
  const SessionId session = reservation.session;
  const storage::ReservationId id = reservation.id;
  progress_[session] = world_.clock.Now();
  cache().Publish(session, id, SourceOf(reservation.text, publishes_++),
                  [this, session, id](PublishOutcome outcome) { Published(session, id, outcome); });
}

void Driver::Published(SessionId session, storage::ReservationId id, PublishOutcome outcome) {
  Trace(static_cast<uint64_t>(outcome));
  const auto found = std::ranges::find_if(reservations_, [&](const Reservation& reservation) {
    return reservation.session == session && reservation.id == id;
  });
  if (found == reservations_.end()) return Fail("a publish was answered twice, or was never asked for");
  if (outcome == PublishOutcome::kPublished) {
    published_.insert(found->text);
    republished_.insert(found->text);
    erased_.erase(found->text);
    used_[found->text] = surely_used_[found->text] = world_.clock.Now();
  }
  const bool copied = outcome == PublishOutcome::kPublished || outcome == PublishOutcome::kUnavailable;
  if (copied && progress_.contains(session)) progress_[session] = world_.clock.Now();
  if (outcome == PublishOutcome::kBusy) {
    found->publishing = false;
  } else {
    reservations_.erase(found);
  }
}

void Driver::Abandon() {
  if (reservations_.empty()) return;
  const auto reservation = Any(reservations_);
  if (reservation->publishing) return;
  cache().Abandon(reservation->session, reservation->id);
  reservations_.erase(reservation);
}

// Another process of an engine attaches to what one found, with the same shard or another one.
void Driver::Attach() {
  if (leases_.empty()) return;
  const Lease first = *Any(leases_);
  const SessionId session = AnySession();
  const TensorShard shard = Plans().at(AnyText(1)).shard;
  const absl::StatusOr<Match> match = cache().Attach(session, first.id, shard);
  if (!match.ok()) {
    if (TenantOf(session) == TenantOf(first.session)) Fail("a lease is gone that no session ended");
    return;
  }
  if (TenantOf(session) != TenantOf(first.session)) return Fail("attached to another tenant's lease");
  Used(first.id, false);
  Lease lease{.session = session, .id = match->lease};
  for (const Found& found : match->found) {
    if (found.reason != MissReason::kNone || found.header->kind != ObjectKind::kSegment) continue;
    const auto text = std::ranges::find_if(Plans(), [&](const auto& item) {
      return item.first.first == TenantOf(session) && IsOf(*found.header, item.first);
    });
    if (text == Plans().end() || found.header->shard != shard) return Fail("attached to an object without a lookup");
    CheckHit(text->first, found, std::nullopt);
    lease.texts.push_back(text->first);
  }
  // An object that is gone keeps its space as long as any holder of the lease keeps the lease.
  if (match->lease == first.id) {
    lease.texts = first.texts;
    lease.asked = first.asked;
    lease.composed = first.composed;
  } else {
    lease.deadline = world_.clock.Now() + kDeadline;
  }
  const bool held = std::ranges::any_of(
      leases_, [&](const Lease& other) { return other.session == session && other.id == match->lease; });
  if (!held) leases_.push_back(std::move(lease));
}

// Its deadline no longer ends it.
void Driver::Used(const LeaseId& id, bool composed) {
  for (Lease& lease : leases_) {
    if (lease.id != id) continue;
    lease.deadline.reset();
    lease.composed |= composed;
  }
}

void Driver::Land() {
  if (leases_.empty()) return;
  Lease& lease = *Any(leases_);
  const bool prefix = lease.asked && (lease.texts.empty() || Draw(2) == 0);
  if (prefix) return LandPrefix(lease);
  if (!lease.texts.empty()) LandText(lease);
}

void Driver::LandText(Lease& lease) {
  const Text text = *Any(lease.texts);
  Landing landing{.session = lease.session, .texts = {text}, .lease = lease.id};
  const uint64_t positions = kPosition + Plans().at(text).tokens;
  landing.pages = std::make_unique<TestPages>(TestPages::Holding(positions));
  // The match lists misses, too: find the index of the text.
  const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
  if (!held.ok()) return Fail("a lease is gone that no session ended");
  uint32_t index = 0;
  while (held->found[index].header == nullptr || !IsOf(*held->found[index].header, text)) {
    if (++index == held->found.size()) return;  // dropped since: it is reported as a miss
  }
  Used(lease.id, true);
  storage::LandTarget target = storage::TestTarget(*landing.pages, {{index, kPosition}});
  StartLanding(std::move(landing), std::move(target));
}

LandingId Driver::StartLanding(Landing landing, storage::LandTarget target) {
  const LandingId number = next_landing_++;
  const SessionId session = landing.session;
  const LeaseId lease = landing.lease;
  landings_.emplace(number, std::move(landing));
  cache().Land(session, number, lease, std::move(target),
               {.progress = [](uint32_t) {},
                .done = [this, number](const std::vector<MissReason>& verdict) { Landed(number, verdict); }});
  return number;
}

void Driver::Landed(LandingId number, const std::vector<MissReason>& verdict) {
  const auto found = landings_.find(number);
  if (found == landings_.end()) return Fail("a landing was answered twice");
  const Landing landing = std::move(found->second);
  landings_.erase(found);
  Trace(static_cast<uint64_t>(verdict[0]));
  for (const MissReason reason : verdict) {
    if (reason == MissReason::kCancelled && !landing.cancelled) Fail("a landing ended as cancelled without Cancel");
    if (reason == MissReason::kBusy && MayBegin(TenantOf(landing.session))) {
      Fail("a landing was refused, and there was space for it");
    }
  }
  if (landing.asked) return LandedPrefix(landing, verdict);
  if (fillings_.contains(number)) return Filled(number, verdict);
  const MissReason reason = verdict[0];
  if (reason == MissReason::kCancelled || reason == MissReason::kBusy) return;
  if (reason != MissReason::kNone) return CheckMiss(landing.texts[0], reason);
  if (world_.bug == Bug::kFlipsLandedBits) landing.pages->Key(0, kPosition + 4, 0)[0] += 1;
  const double error =
      storage::LandingError(*landing.pages, Plans().at(landing.texts[0]), ContentOf(landing.texts[0]), kPosition);
  if (!(error < kTolerance)) Fail("bytes landed are not the bytes published");
}

void Driver::Quiesce() {
  if (landings_.empty() && compositions_.empty()) return;
  const bool composing = landings_.empty() || (!compositions_.empty() && Draw(3) == 0);
  LandingId number = 0;
  SessionId session = 0;
  if (composing) {
    const auto composition = Any(compositions_);
    composition->second.cancelled = true;
    number = composition->first;
    session = composition->second.session;
  } else {
    const auto landing = Any(landings_);
    landing->second.cancelled = true;
    number = landing->first;
    session = landing->second.session;
  }
  cache().Quiesce(session, number, [this, number] {
    if (landings_.contains(number) || compositions_.contains(number)) Fail("a landing is quiet before its verdict");
  });
}

void Driver::Die() {
  const auto dead = Any(sessions_);
  const SessionId session = *dead;
  Note(Fault::kEngineDeath);
  std::erase_if(leases_, [&](const Lease& lease) { return lease.session == session; });
  std::erase_if(reservations_, [&](const Reservation& r) { return r.session == session && !r.publishing; });
  for (auto& [number, landing] : landings_) landing.cancelled |= landing.session == session;
  for (auto& [number, composition] : compositions_) composition.cancelled |= composition.session == session;
  EndRequestsOf(session);
  ++draining_;
  Close(session, [this, session] {
    --draining_;
    const auto of_session = [session](const auto& item) { return item.second.session == session; };
    if (std::ranges::any_of(landings_, of_session)) Fail("a session is drained before its landing");
    if (std::ranges::any_of(compositions_, of_session)) Fail("a session is drained before its composition");
    if (std::ranges::any_of(commits_, of_session)) Fail("a session is drained before its commit");
  });
  sessions_.erase(dead);
  Open();
}

// Time passes before overdue items are processed.
void Driver::Advance() {
  world_.clock.Advance(static_cast<Nanos>(Draw(kDeadline / 2)));
}

void Driver::SetFaults() {
  storage::SimulatedDisk::Faults faults;
  const auto rate = [&] { return Draw(3) == 0 ? 0.3 : 0.0; };
  faults.read_error = rate();
  faults.write_error = rate();
  faults.sync_error = rate();
  faults.record_error = rate();
  faults.bit_flip = rate();
  faults.no_space = rate();
  faults.full = Draw(4) == 0;
  if (world_.bug == Bug::kLosesFlushes) faults = {.lost_flush = 1};
  world_.disk.set_faults(faults);
  world_.executor.set_capacity(Draw(3) == 0 ? 2 : 64);
  world_.io.set_capacity(Draw(3) == 0 ? 3 : 64);
}

void Driver::Crash() {
  Note(Fault::kCrash);
  DropSlices();
  using Name = std::tuple<TenantId, Key, TensorShard>;
  std::vector<Name> names;
  for (const auto& [text, plan] : Plans()) names.emplace_back(text.first, plan.key, plan.shard);
  for (const auto& [tenant, key] : written_) names.emplace_back(tenant, key, TensorShard{});
  const auto on_disk = [this](const Name& name) {
    const auto& [tenant, key, shard] = name;
    return std::ranges::count(cache().upkeep().inventory().Where(tenant, key, shard), TierKind::kSsd) > 0;
  };
  std::erase_if(names, [&](const Name& name) { return !on_disk(name); });
  leases_.clear();
  reservations_.clear();
  landings_.clear();
  compositions_.clear();
  commits_.clear();
  fillings_.clear();
  requests_.clear();
  for (auto& [tenant, region] : regions_) region.pool.reset();
  sessions_.clear();
  arena_tenants_.clear();
  pins_.clear();
  pinned_prefixes_.clear();
  for (auto& [text, used] : used_) used = surely_used_[text] = world_.clock.Now();
  draining_ = 0;
  drains_ = false;
  if (std::exchange(erasure_, nullptr) != nullptr) half_erased_.insert(erases_);
  world_.CrashAndRestart();
  for (int i = 0; i < kSessions; ++i) Open();
  if (!std::ranges::all_of(names, on_disk)) Fail("what the disk acknowledged is not there after a crash");
  CheckErased();
}

void Driver::Operate() {
  const Text text = AnyText(1 + Draw(kTenants));
  const Key& key = Plans().at(text).key;
  if (drains_ || Draw(16) == 0) {
    drains_ = !drains_;
    return drains_ ? cache().offers().StartDrain() : cache().offers().EndDrain();
  }
  switch (Draw(3)) {
    case 0:
      for (const Text& part : BundleOf(text)) operator_evicted_.insert(part);
      cache().retention().Evict(text.first, key);
      break;
    case 1: {
      const Nanos until = world_.clock.Now() + static_cast<Nanos>(Draw(kDeadline));
      if (!cache().retention().Pin(text.first, key, until)) break;
      for (const Text& part : BundleOf(text)) pins_[part] = until;
      break;
    }
    default:
      cache().retention().Unpin(text.first, key);
      for (const Text& part : BundleOf(text)) pins_.erase(part);
  }
}

void Driver::Execute() {
  const size_t of_disk = world_.io.hangs() ? 0 : world_.io.pending();
  const bool first = of_disk == 0 || (world_.executor.pending() > 0 && Draw(2) == 0);
  SimulatedExecutor& executor = first ? world_.executor : world_.io;
  if ((first ? world_.executor.pending() : of_disk) == 0) return;
  const bool drop = world_.bug == Bug::kDropsCompletions && Draw(8) == 0;
  executor.Proceed(Draw(executor.pending()), drop);
}

// For some steps; or it responds again.
void Driver::HangDisk() {
  if (!world_.io.hangs()) {
    Note(Fault::kHang);
    hung_ = true;
    return world_.io.Hang(true);
  }
  if (Draw(2) == 0) OutlastHang();
  world_.io.Hang(false);
}

// The disk's deadline passes. Promise 10: then nothing waits for the disk.
void Driver::OutlastHang() {
  if (world_.io.pending() == 0) return;
  EndSlices();
  world_.clock.Advance(storage::SsdHealth::kDeadline);
  for (int ticks = 0; ticks < 2; ++ticks) {  // the first one may be late
    for (storage::Slice whole; !cache().Tick(whole);) {
    }
  }
  ticks_ = ticked_in_parts_ = false;
  CheckDeadlines();
  while (world_.executor.pending() > 0) world_.executor.Proceed(0, false);
  if (!world_.ssd->health().degraded()) Fail("a disk hangs, and its tier is not degraded");
  if (!landings_.empty() || !compositions_.empty()) Fail("a landing or a composition waits for a disk that hangs");
}

}  // namespace ashlar::simulation
