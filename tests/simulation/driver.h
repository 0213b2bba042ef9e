// The clients, operators and faults of one simulation, drawn step by step, and the oracle that watches them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/limits.h"
#include "tests/simulation/simulation.h"
#include "tests/simulation/world.h"

namespace ashlar::simulation {

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

inline constexpr uint64_t kTexts = 7;
inline constexpr uint64_t kBundle[] = {3, 4};  // texts that are the shards of one key
inline constexpr int kSessions = 4;
inline constexpr Nanos kDeadline = 60'000'000'000;
inline constexpr double kTolerance = 1e-5;

// What the oracle knows of one text of one tenant.
using Text = std::pair<TenantId, uint64_t>;

// Plans of all texts. They and what engines publish are made once a process and never change.
const std::map<Text, ObjectHeader>& Plans();

class Driver {
 public:
  Driver(uint64_t seed, Bug bug) : world_(seed, DrawSizes(seed), bug), plans_(Plans()) {
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
    LeaseId id;
    std::vector<Text> texts;  // what it keeps
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
  // What computing a text takes, as its engine says; mostly it does not.
  Nanos AnyRecompute() { return world_.Draw(4) == 0 ? 1 + static_cast<Nanos>(world_.Draw(kDeadline / 6)) : 0; }
  // When a look-up's texts are needed: mostly now.
  Nanos AnyNeed() { return world_.Draw(4) == 0 ? world_.clock.Now() + static_cast<Nanos>(world_.Draw(kDeadline)) : 0; }
  static std::vector<Text> BundleOf(const Text& text) {
    if (Plans().at(text).shard.size == 1) return {text};
    std::vector<Text> all;
    for (const uint64_t part : kBundle) all.emplace_back(text.first, part);
    return all;
  }
  static bool IsOf(const ObjectHeader& header, const Text& text) {
    const ObjectHeader& plan = Plans().at(text);
    return header.key == plan.key && header.shard == plan.shard;
  }
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
  void Attach();
  void CheckHit(const Text& text, const Found& found);
  bool Leased(const Text& text);
  void CheckMiss(const Text& text, MissReason reason, Nanos recompute = 0);
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
  const std::map<Text, ObjectHeader>& plans_;
  std::set<Text> published_;  // ever
  uint64_t publishes_ = 0;
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
  std::set<Text> declined_;     // ever
  std::map<Text, Nanos> pins_;  // until when
  bool drains_ = false;
};

}  // namespace ashlar::simulation
