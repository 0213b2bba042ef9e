#include "tests/simulation/simulation.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "tests/simulation/world.h"

namespace ashlar::simulation {
namespace {

using storage::Cache;
using storage::ExtentRun;
using storage::Found;
using storage::LandingId;
using storage::LeaseId;
using storage::Match;
using storage::Nanos;
using storage::SessionId;
using storage::TenantId;
using storage::TestPages;

constexpr uint64_t kTexts = 7;
constexpr int kSessions = 4;
constexpr Nanos kDeadline = 60'000'000'000;
constexpr double kTolerance = 1e-5;

// What the oracle knows of one text of one tenant.
using Text = std::pair<TenantId, uint64_t>;

ObjectHeader Plan(const Text& text) {
  return storage::TestPlan(text.second, 20 + 40 * text.second, ObjectKind::kSegment, text.first);
}

class Driver {
 public:
  Driver(uint64_t seed, Bug bug) : world_(seed, DrawSizes(seed), bug) {
    for (const TenantId tenant : {1, 2}) {
      for (uint64_t text = 1; text <= kTexts; ++text) plans_.emplace(Text(tenant, text), Plan({tenant, text}));
    }
    for (int i = 0; i < kSessions; ++i) Open();
  }

  Report Run(int operations) {
    for (report_.step = 0; static_cast<int>(report_.step) < operations && report_.failure.empty(); ++report_.step) {
      Step();
      NoteFaults();
      CheckBudgets();
      if (report_.step % 16 == 0) CheckLeases();
    }
    if (report_.failure.empty()) Conclude();
    return report_;
  }

 private:
  struct Reservation {
    SessionId session;
    storage::ReservationId id;
    Text text;
    bool publishing = false;
  };
  struct Lease {
    SessionId session;
    Match match;
    std::vector<Text> texts;
    bool used = false;
  };
  struct Landing {
    SessionId session;
    LandingId id;
    std::vector<Text> texts;
    bool cancelled = false;
    std::unique_ptr<TestPages> pages;
  };

  static Sizes DrawSizes(uint64_t seed) {
    std::mt19937_64 random(seed ^ 0x5EED);
    return {.hbm = random() % 3 == 0 ? 10 + random() % 8 : 0, .dram = 12 + random() % 12, .ssd = 16 + random() % 24};
  }

  void Fail(const std::string& what) {
    if (report_.failure.empty()) report_.failure = what;
  }
  void Trace(uint64_t value) { report_.trace = (report_.trace ^ value) * 0x100000001B3; }

  Cache& cache() { return *world_.cache; }
  SessionId AnySession() { return sessions_[world_.Draw(sessions_.size())]; }
  static TenantId TenantOf(SessionId session) { return 1 + session % 2; }
  Text AnyText(TenantId tenant) { return {tenant, 1 + world_.Draw(kTexts)}; }

  void Open() {
    sessions_.push_back(next_session_++);
    cache().OpenSession(sessions_.back(), TenantOf(sessions_.back()));
  }

  void Step();
  void Reserve();
  void Publish();
  void Published(SessionId session, storage::ReservationId id, PublishOutcome outcome);
  void Abandon();
  void Lookup();
  void CheckHit(const Text& text, const Found& found);
  bool Leased(const Text& text);
  void CheckMiss(const Text& text, MissReason reason);
  void Release();
  void Land();
  void Landed(uint64_t number, const std::vector<MissReason>& verdict);
  void Quiesce();
  void Die();
  void Tick();
  void SetFaults();
  void Crash();
  void Operate();
  void Execute();

  void NoteFaults();
  void Note(Fault fault);
  void CheckBudgets();
  void CheckLeases();
  void CheckRoom(TenantId tenant, uint64_t extents);
  void Conclude();

  bool Corrupted() const { return world_.disk.counts().bit_flips > 0; }
  bool TierFailed() const { return !world_.observer.tier_errors.empty(); }

  World world_;
  Report report_;
  std::map<Text, ObjectHeader> plans_;
  std::set<Text> published_;  // ever
  SessionId next_session_ = 1;
  LandingId next_landing_ = 1;
  std::vector<SessionId> sessions_;
  std::vector<Reservation> reservations_;
  std::vector<Lease> leases_;
  std::map<uint64_t, Landing> landings_;
  uint64_t draining_ = 0;
  std::map<uint32_t, TenantId> arena_tenants_;
  storage::SimulatedDisk::Counts seen_;
  uint64_t seen_refused_ = 0;
  std::set<Text> operator_evicted_;
};

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
  const Cache::Reservation reservation = cache().Reserve(session, plan, {}, pool);
  Trace(static_cast<uint64_t>(reservation.outcome));
  if (reservation.outcome == ReserveOutcome::kGranted) reservations_.push_back({session, reservation.id, text});
  if (reservation.outcome == ReserveOutcome::kNoSpace) CheckRoom(text.first, plan.Extents());
}

// Promise 3: who is refused for want of room is refused because of what others hold.
void Driver::CheckRoom(TenantId tenant, uint64_t extents) {
  if (cache().stats().copies_under_way > 0 || cache().stats().landings > 0) return;  // they hold for a moment
  if (world_.observer.memory_refusals > 0) return;  // the machine that simulates has no memory left itself
  std::set<Text> held;
  for (const Lease& lease : leases_) {
    if (TenantOf(lease.session) == tenant) held.insert(lease.texts.begin(), lease.texts.end());
  }
  uint64_t used = 0;
  for (const Text& text : held) used += plans_.at(text).Extents();
  for (const Reservation& reservation : reservations_) {
    if (reservation.text.first == tenant) used += plans_.at(reservation.text).Extents();
  }
  // A text that was dropped under a lease and published again stands there twice: count it so.
  if (2 * used + extents <= world_.TopExtents()) Fail("room that nobody holds was refused");
}

void Driver::Publish() {
  if (reservations_.empty()) return;
  Reservation& reservation = reservations_[world_.Draw(reservations_.size())];
  if (reservation.publishing) return;
  reservation.publishing = true;
  const SessionId session = reservation.session;
  const storage::ReservationId id = reservation.id;
  cache().Publish(session, id, storage::TestSource(plans_.at(reservation.text), reservation.text.second),
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
    queries.push_back({.kind = plan.kind, .key = plan.key, .tokens = plan.tokens});
  }
  lease.match = cache().Lookup(session, queries);
  for (size_t i = 0; i < queries.size(); ++i) {
    const Found& found = lease.match.found[i];
    Trace(static_cast<uint64_t>(found.reason));
    found.reason == MissReason::kNone ? CheckHit(lease.texts[i], found) : CheckMiss(lease.texts[i], found.reason);
  }
  std::erase_if(lease.texts,
                [&, i = size_t{0}](const Text&) mutable { return lease.match.found[i++].reason != MissReason::kNone; });
  std::erase_if(lease.match.found, [](const Found& found) { return found.reason != MissReason::kNone; });
  if (lease.match.lease != LeaseId{}) leases_.push_back(std::move(lease));
}

void Driver::CheckHit(const Text& text, const Found& found) {
  if (!published_.contains(text)) Fail("found what its tenant never published");
  if (found.header->key != plans_.at(text).key) Fail("found another text's object");
  if (found.slot->Extents() != plans_.at(text).Extents()) Fail("found an object of another size");
}

// One that was dropped under its lease, and published again since, is another object.
bool Driver::Leased(const Text& text) {
  for (const Lease& lease : leases_) {
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.match.lease);
    for (const Found& found : held.ok() ? held->found : std::vector<Found>{}) {
      if (found.header != nullptr && found.header->key == plans_.at(text).key) return true;
    }
  }
  return false;
}

void Driver::CheckMiss(const Text& text, MissReason reason) {
  switch (reason) {
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kAbandoned:
    case MissReason::kBusy:
    case MissReason::kBudgetRefused:
      break;
    case MissReason::kEvicted:
      if (Leased(text) && !operator_evicted_.contains(text)) Fail("leased data was evicted");
      break;
    case MissReason::kChecksumFailed:
      if (!Corrupted()) Fail("a copy is corrupt, and nothing corrupted it");
      break;
    case MissReason::kTierError:
      if (!TierFailed()) Fail("a tier error that no tier had");
      break;
    default:
      Fail(absl::StrCat("a miss for no good reason: ", std::string(Name(reason))));
  }
}

void Driver::Release() {
  if (leases_.empty()) return;
  const size_t i = world_.Draw(leases_.size());
  cache().Release(leases_[i].session, leases_[i].match.lease);
  leases_.erase(leases_.begin() + static_cast<ptrdiff_t>(i));
}

void Driver::Land() {
  if (leases_.empty()) return;
  Lease& lease = leases_[world_.Draw(leases_.size())];
  if (lease.texts.empty()) return;
  lease.used = true;
  const uint64_t number = next_landing_++;
  Landing landing{.session = lease.session, .id = number, .texts = {lease.texts[0]}};
  landing.pages = std::make_unique<TestPages>(24);
  // The match lists misses, too: find the index of the first hit.
  const absl::StatusOr<Match> held = cache().Held(lease.session, lease.match.lease);
  if (!held.ok()) return Fail("a lease is gone that nobody ended");
  uint32_t index = 0;
  while (held->found[index].header == nullptr || held->found[index].header->key != plans_.at(lease.texts[0]).key) {
    if (++index == held->found.size()) return;  // dropped since: it is described as a miss
  }
  const storage::LandTarget target = storage::TestTarget(*landing.pages, {{index, 5}});
  landings_.emplace(number, std::move(landing));
  cache().Land(lease.session, number, lease.match.lease, target,
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
  } else if (verdict[0] != MissReason::kNone) {
    CheckMiss(landing.texts[0], verdict[0]);
  } else {
    if (world_.bug == Bug::kFlipsLandedBits) landing.pages->Key(0, 5 + 4, 0)[0] += 1;
    const double error = storage::LandingError(*landing.pages, plans_.at(landing.texts[0]), landing.texts[0].second, 5);
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
  std::erase_if(leases_, [&](const Lease& lease) { return !cache().Held(lease.session, lease.match.lease).ok(); });
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
    const std::vector<TierKind> tiers = cache().Where(text.first, plan.key);
    if (std::ranges::count(tiers, TierKind::kSsd) > 0) durable.push_back(text);
  }
  leases_.clear();
  reservations_.clear();
  landings_.clear();
  sessions_.clear();
  arena_tenants_.clear();
  draining_ = 0;
  world_.CrashAndRestart();
  for (int i = 0; i < kSessions; ++i) Open();
  for (const Text& text : durable) {
    const std::vector<TierKind> tiers = cache().Where(text.first, plans_.at(text).key);
    if (std::ranges::count(tiers, TierKind::kSsd) == 0) Fail("what the disk acknowledged is not there after a crash");
  }
}

void Driver::Operate() {
  const Text text = AnyText(1 + world_.Draw(kTenants));
  const Key& key = plans_.at(text).key;
  switch (world_.Draw(3)) {
    case 0:
      if (cache().Evict(text.first, key)) operator_evicted_.insert(text);
      break;
    case 1:
      cache().Pin(text.first, key, world_.clock.Now() + static_cast<Nanos>(world_.Draw(kDeadline)));
      break;
    default:
      cache().Unpin(text.first, key);
  }
}

void Driver::Execute() {
  SimulatedExecutor& executor = world_.Draw(2) == 0 ? world_.executor : world_.io;
  if (executor.pending() == 0) return;
  const bool drop = world_.bug == Bug::kDropsCompletions && world_.Draw(8) == 0;
  executor.Complete(world_.Draw(executor.pending()), drop);
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
    const absl::StatusOr<Match> held = cache().Held(lease.session, lease.match.lease);
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
      // A read that fails leaves rubbish in a copy that is on its way up.
      const std::vector<TierKind> whole = cache().Where(TenantOf(lease.session), found.header->key);
      if (whole.empty() || whole.front() != world_.top().kind() || Corrupted()) continue;
      const ExtentRun& first = found.slot->runs.front();
      const std::string header = EncodeHeader(*found.header);
      const std::byte* there = world_.top().Address(first.arena, first.first);
      if (std::memcmp(there, header.data(), header.size()) != 0) return Fail("a leased object's header changed");
    }
  }
}

// Everything ends; then nothing is held, and everybody has all of his room.
void Driver::Conclude() {
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
    while (world_.executor.pending() + world_.io.pending() > 0) {
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

}  // namespace

void Coverage::Add(const Coverage& other) {
  for (size_t fault = 0; fault < kFaults; ++fault) {
    for (size_t state = 0; state < kStates; ++state) pairs[fault][state] += other.pairs[fault][state];
  }
}

std::string Coverage::Missing() const {
  static constexpr const char* kFaultNames[kFaults] = {"read error",   "write error", "sync error",
                                                       "record error", "bit flip",    "disk full",
                                                       "crash",        "queue full",  "engine death"};
  static constexpr const char* kStateNames[kStates] = {"leased",  "reserved", "publishing",
                                                       "landing", "copying",  "draining"};
  std::string missing;
  for (size_t fault = 0; fault < kFaults; ++fault) {
    for (size_t state = 0; state < kStates; ++state) {
      if (pairs[fault][state] == 0) absl::StrAppend(&missing, kFaultNames[fault], " while ", kStateNames[state], "; ");
    }
  }
  return missing;
}

Report Simulate(uint64_t seed, int operations, Bug bug) {
  return Driver(seed, bug).Run(operations);
}

}  // namespace ashlar::simulation
