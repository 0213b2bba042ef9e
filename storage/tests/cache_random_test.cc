// SPDX-License-Identifier: Apache-2.0
// Random operations against a model: every answer is predicted, and budgets hold at every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/limits.h"
#include "storage/cache.h"
#include "storage/testing/rig.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kBudget = 20;  // extents per tenant
constexpr uint64_t kTextsPerTenant = 10;
constexpr int kSessions = 4;
constexpr Nanos kDeadline = 1000;

// A simple model of the cache's decisions: lists, no slots, no threads.
class Model {
 public:
  struct Object {
    uint64_t extents = 0;
    bool ready = false;
    bool reserved = false;  // in the table, but not ready
    int references = 0;
    uint64_t last_use = 0;
    MissReason gone = MissReason::kNeverSeen;
  };
  using Name = std::pair<TenantId, uint64_t>;

  Object& operator[](const Name& name) { return objects_[name]; }

  MissReason Find(const Name& name) const {
    const auto found = objects_.find(name);
    if (found == objects_.end()) return MissReason::kNeverSeen;
    if (found->second.ready) return MissReason::kNone;
    return found->second.reserved ? MissReason::kBeingPublished : found->second.gone;
  }

  ReserveOutcome Reserve(const Name& name, uint64_t extents) {
    Object& object = objects_[name];
    if (object.ready) object.last_use = ++uses_;
    if (object.ready) return ReserveOutcome::kAlreadyPresent;
    if (object.reserved) return ReserveOutcome::kBeingPublished;
    uint64_t used = 0, idle = 0;
    for (const auto& [other, o] : objects_) {
      if (other.first != name.first) continue;
      used += o.ready || o.reserved ? o.extents : 0;
      idle += o.ready && o.references == 0 ? o.extents : 0;
    }
    if (used - idle + extents > kBudget) {
      object.gone = MissReason::kBudgetRefused;
      return ReserveOutcome::kNoSpace;
    }
    while (used + extents > kBudget) {
      Object* oldest = nullptr;
      for (auto& [other, o] : objects_) {
        if (other.first != name.first || !o.ready || o.references > 0) continue;
        if (oldest == nullptr || o.last_use < oldest->last_use) oldest = &o;
      }
      oldest->ready = false;
      oldest->gone = MissReason::kEvicted;
      used -= oldest->extents;
    }
    object.extents = extents;
    object.reserved = true;
    return ReserveOutcome::kGranted;
  }

  void Publish(const Name& name) {
    objects_[name].reserved = false;
    objects_[name].ready = true;
    objects_[name].last_use = ++uses_;
  }
  void Abandon(const Name& name) {
    objects_[name].reserved = false;
    objects_[name].gone = MissReason::kAbandoned;
  }
  void Use(const Name& name) { ++objects_[name].references; }
  void LetGo(const Name& name) {
    if (--objects_[name].references == 0) objects_[name].last_use = ++uses_;
  }

  uint64_t UsedExtents(TenantId tenant) const {
    uint64_t used = 0;
    for (const auto& [name, o] : objects_) {
      if (name.first == tenant && (o.ready || o.reserved)) used += o.extents;
    }
    return used;
  }

 private:
  std::map<Name, Object> objects_;
  uint64_t uses_ = 0;
};

class RandomTest : public ::testing::TestWithParam<int> {
 protected:
  using Name = Model::Name;
  struct Reservation {
    SessionId session;
    ReservationId id;
    Name name;
    Nanos reserved_at;
    bool publishing = false;
    bool cancelled = false;
  };
  struct Lease {
    SessionId session;
    Match match;
    std::vector<Name> names;  // one name per segment
    std::vector<bool> hits;
    std::optional<Nanos> deadline;
  };

  RandomTest()
      : rig_(kBudget, {.unused_lease = kDeadline,
                       .reservation = kDeadline,
                       .objects = {.eviction = EvictionMode::kLru},  // like the model's
                       .random = [this] { return random_(); }}) {
    for (int i = 0; i < kSessions; ++i) Open();
  }

  uint64_t Draw(uint64_t below) { return random_() % below; }
  static TenantId Tenant(SessionId session) { return 1 + session % 2; }
  static ObjectHeader Plan(const Name& name) {
    return TestPlan(name.second, 20 + 90 * name.second, ObjectKind::kSegment, name.first);
  }

  void Open() {
    sessions_.push_back(next_session_++);
    rig_.cache.OpenSession(sessions_.back(), Tenant(sessions_.back()));
  }

  void Reserve() {
    const SessionId session = sessions_[Draw(kSessions)];
    const Name name(Tenant(session), 1 + Draw(kTextsPerTenant));
    const ObjectHeader plan = Plan(name);
    const auto reservation = rig_.cache.Reserve(session, plan);
    ASSERT_EQ(reservation.outcome, model_.Reserve(name, plan.Extents()));
    if (reservation.outcome != ReserveOutcome::kGranted) return;
    reservations_.push_back({session, reservation.id, name, rig_.clock.Now()});
  }

  // Usually the right source; sometimes one that lacks a part.
  void Publish() {
    if (reservations_.empty()) return;
    const size_t i = Draw(reservations_.size());
    Reservation& reservation = reservations_[i];
    PublishSource source = TestSource(Plan(reservation.name), reservation.name.second);
    const bool bad = Draw(8) == 0;
    if (bad) source.rows.pop_back();
    auto told = std::make_shared<std::optional<PublishOutcome>>();
    const Name name = reservation.name;
    rig_.cache.Publish(reservation.session, reservation.id, std::move(source),
                       [this, told, id = reservation.id, name](PublishOutcome outcome) {
                         *told = outcome;
                         if (!in_executor_) return;
                         const auto ended = std::ranges::find(reservations_, id, &Reservation::id);
                         ASSERT_NE(ended, reservations_.end());
                         if (progress_.contains(ended->session)) progress_[ended->session] = rig_.clock.Now();
                         ASSERT_EQ(outcome,
                                   ended->cancelled ? PublishOutcome::kUnavailable : PublishOutcome::kPublished);
                         ended->cancelled ? model_.Abandon(name) : model_.Publish(name);
                         reservations_.erase(ended);
                       });
    if (!reservation.publishing) progress_[reservation.session] = rig_.clock.Now();
    if (reservation.publishing) {
      ASSERT_EQ(*told, PublishOutcome::kUnknownReservation);
    } else if (bad) {
      ASSERT_EQ(*told, PublishOutcome::kBadSource);
      model_.Abandon(name);
      reservations_.erase(reservations_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ASSERT_FALSE(*told);
      reservation.publishing = true;
    }
  }

  void Abandon() {
    if (reservations_.empty()) return;
    const size_t i = Draw(reservations_.size());
    const Reservation reservation = reservations_[i];
    rig_.cache.Abandon(reservation.session, reservation.id);
    if (reservation.publishing) return;
    model_.Abandon(reservation.name);
    reservations_.erase(reservations_.begin() + static_cast<ptrdiff_t>(i));
  }

  void Lookup() {
    const SessionId session = sessions_[Draw(kSessions)];
    Lease lease{.session = session, .deadline = rig_.clock.Now() + kDeadline};
    std::vector<Query> queries;
    for (uint64_t i = 0; i <= Draw(4); ++i) {
      lease.names.emplace_back(Tenant(session), 1 + Draw(kTextsPerTenant));
      queries.push_back(rig_.Ask(Plan(lease.names.back())));
    }
    lease.match = rig_.cache.Lookup(session, queries);
    for (size_t i = 0; i < queries.size(); ++i) {
      ASSERT_EQ(lease.match.found[i].reason, model_.Find(lease.names[i]));
      lease.hits.push_back(lease.match.found[i].reason == MissReason::kNone);
      if (lease.hits.back()) model_.Use(lease.names[i]);
    }
    if (lease.match.lease != LeaseId{}) leases_.push_back(std::move(lease));
  }

  void EndLease(size_t i) {
    const Lease lease = std::move(leases_[i]);
    leases_.erase(leases_.begin() + static_cast<ptrdiff_t>(i));
    for (size_t s = 0; s < lease.names.size(); ++s) {
      if (lease.hits[s]) model_.LetGo(lease.names[s]);
    }
  }

  void Release() {
    if (leases_.empty()) return;
    const size_t i = Draw(leases_.size());
    rig_.cache.Release(leases_[i].session, leases_[i].match.lease);
    EndLease(i);
  }

  void Land() {
    if (leases_.empty()) return;
    Lease& lease = leases_[Draw(leases_.size())];
    lease.deadline.reset();
    const auto pages = std::make_shared<TestPages>(64);
    std::vector<LandTarget::Segment> segments(1 + Draw(lease.names.size()));
    std::vector<Name> used;
    for (uint32_t s = 0; s < segments.size(); ++s) {
      segments[s].index = s;
      if (lease.hits[s]) used.push_back(lease.names[s]);
    }
    for (const Name& name : used) model_.Use(name);
    const bool moves = !used.empty();
    landings_ += moves ? 1 : 0;
    const auto done = [this, used, moves, hits = lease.hits,
                       session = lease.session](const std::vector<MissReason>& verdict) {
      for (size_t s = 0; s < verdict.size(); ++s) {
        const bool cancelled = verdict[s] == MissReason::kCancelled;
        EXPECT_EQ(verdict[s] == MissReason::kNone || cancelled, hits[s]);
        EXPECT_FALSE(cancelled && std::ranges::count(sessions_, session) > 0);
      }
      for (const Name& name : used) model_.LetGo(name);
      landings_ -= moves ? 1 : 0;
    };
    rig_.cache.Land(lease.session, next_landing_++, lease.match.lease, TestTarget(*pages, segments),
                    {.progress = [](uint32_t) {}, .done = done});
  }

  void Execute() {
    if (rig_.executor.pending() == 0) return;
    in_executor_ = true;
    rig_.executor.Complete(Draw(rig_.executor.pending()));
    in_executor_ = false;
  }

  void Close() {
    const size_t i = Draw(kSessions);
    const SessionId session = sessions_[i];
    rig_.cache.CloseSession(session, [] {});
    for (size_t l = 0; l < leases_.size();) leases_[l].session == session ? EndLease(l) : void(++l);
    std::erase_if(reservations_, [&](Reservation& reservation) {
      if (reservation.session != session) return false;
      if (reservation.publishing) {
        reservation.cancelled = true;
        return false;
      }
      model_.Abandon(reservation.name);
      return true;
    });
    progress_.erase(session);
    sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i));
    Open();
  }

  // A session's publishes renew its other reservations, up to ten times the usual.
  Nanos DeadlineOf(const Reservation& reservation) const {
    const auto progress = progress_.find(reservation.session);
    const Nanos since = progress == progress_.end() ? 0 : progress->second;
    return std::max(reservation.reserved_at, std::min(since, reservation.reserved_at + 9 * kDeadline)) + kDeadline;
  }

  void Tick() {
    rig_.clock.Advance(static_cast<Nanos>(Draw(kDeadline / 2)));
    rig_.cache.Tick();
    const Nanos now = rig_.clock.Now();
    for (size_t l = 0; l < leases_.size();) {
      const bool ends = leases_[l].deadline && *leases_[l].deadline <= now;
      ends ? EndLease(l) : void(++l);
    }
    std::erase_if(reservations_, [&](const Reservation& reservation) {
      if (reservation.publishing || DeadlineOf(reservation) > now) return false;
      model_.Abandon(reservation.name);
      return true;
    });
  }

  void Check() {
    for (const TenantId tenant : {1, 2}) {
      const TierUsage usage = rig_.tier->Usage(tenant);
      ASSERT_LE(usage.held_bytes, kBudget * limits::kExtentBytes);
      ASSERT_LE(usage.used_bytes, usage.held_bytes);
      ASSERT_EQ(usage.used_bytes, model_.UsedExtents(tenant) * limits::kExtentBytes);
    }
    std::set<const Slot*> slots;
    std::set<std::pair<uint32_t, uint32_t>> extents;
    for (const Lease& lease : leases_) {
      for (size_t s = 0; s < lease.names.size(); ++s) {
        if (!lease.hits[s]) continue;
        const Found& found = lease.match.found[s];
        ASSERT_EQ(found.header->key, Plan(lease.names[s]).key) << "leased data stays";
        if (!slots.insert(found.slot).second) continue;
        ASSERT_EQ(found.slot->tenant, lease.names[s].first);
        for (const ExtentRun& run : found.slot->runs) {
          for (uint32_t e = 0; e < run.count; ++e) ASSERT_TRUE(extents.emplace(run.arena, run.first + e).second);
        }
      }
    }
    const Cache::Stats stats = rig_.cache.stats();
    ASSERT_EQ(stats.leases, leases_.size());
    ASSERT_EQ(stats.reservations, reservations_.size());
    ASSERT_EQ(stats.landings, landings_);
  }

  const unsigned seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  Model model_;
  bool in_executor_ = false;
  SessionId next_session_ = 1;
  LandingId next_landing_ = 1;
  uint64_t landings_ = 0;
  std::vector<SessionId> sessions_;
  std::vector<Reservation> reservations_;
  std::map<SessionId, Nanos> progress_;  // when each last published
  std::vector<Lease> leases_;  // in the order of granting, which is also the order in which the cache ends them
  Rig rig_;
};

TEST_P(RandomTest, EveryAnswerMatchesTheModel) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (int step = 0; step < 1000 && !HasFatalFailure() && !HasNonfatalFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const uint64_t choice = Draw(100);
    if (choice < 20) {
      Reserve();
    } else if (choice < 33) {
      Publish();
    } else if (choice < 36) {
      Abandon();
    } else if (choice < 53) {
      Lookup();
    } else if (choice < 62) {
      Release();
    } else if (choice < 68) {
      Land();
    } else if (choice < 94) {
      Execute();
    } else if (choice < 96) {
      Close();
    } else {
      Tick();
    }
    Check();
  }
  for (const SessionId session : sessions_) rig_.cache.CloseSession(session, [] {});
  for (Reservation& reservation : reservations_) reservation.cancelled = true;
  sessions_.clear();
  in_executor_ = true;
  rig_.executor.CompleteAll();
  EXPECT_EQ(rig_.cache.stats().reservations, 0u);
  EXPECT_EQ(rig_.cache.stats().landings, 0u);
}

INSTANTIATE_TEST_SUITE_P(FreshSeeds, RandomTest, ::testing::Range(0, 3));

}  // namespace
}  // namespace ashlar::storage
