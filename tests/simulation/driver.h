// SPDX-License-Identifier: Apache-2.0
// The clients, operators and faults of one simulation, drawn step by step, and the oracle that watches them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "proto/limits.h"
#include "storage/lookup/search.h"
#include "storage/slice.h"
#include "storage/testing/offered_prefixes.h"
#include "tests/simulation/prompts.h"
#include "tests/simulation/simulation.h"
#include "tests/simulation/texts.h"
#include "tests/simulation/world.h"

namespace ashlar::simulation {

using storage::Cache;
using storage::ExtentRun;
using storage::Found;
using storage::LandingId;
using storage::LeaseId;
using storage::Match;
using storage::Nanos;
using storage::PagePool;
using storage::SessionId;
using storage::TestPages;
using storage::Tokens;

inline constexpr int kSessions = 4;
inline constexpr uint64_t kConversations = 3;
inline constexpr Nanos kDeadline = 60'000'000'000;
inline constexpr double kTolerance = 1e-5;
inline constexpr uint32_t kRegionPages = 32;
inline constexpr size_t kMostCommits = 16;  // most commits in progress of one session

class Driver {
 public:
  Driver(uint64_t seed, Bug bug);
  Report Run(int operations);

 private:
  // Features that some seeds leave out, so that the others occur more often.
  struct Features {
    bool prompts = false, compositions = false, pages = false, slices = false;
  };
  using Act = void (Driver::*)();
  struct Operation {
    uint64_t weight;
    Act act;
  };

  struct Reservation {
    SessionId session;
    storage::ReservationId id;
    Text text;
    Nanos reserved_at;
    bool publishing = false;
  };
  // A prompt as requested, and the prefix from which it may resume.
  struct Asked {
    Tokens tokens;
    ConversationId conversation{};
    Match match;  // its spans and pointers are valid as long as the lease
  };
  struct Lease {
    SessionId session;
    LeaseId id;
    std::vector<Text> texts;        // the texts that it lists
    std::optional<Nanos> deadline;  // none: it was used
    bool composed = false;          // segments, or composed states, were landed from it
    std::optional<Asked> asked;
  };
  // A lookup in progress.
  struct Searching {
    Lease lease;  // the lease to be granted if something is found
    std::vector<Text> texts;
    std::vector<storage::Query> queries;  // the queries
    std::optional<storage::PrefixText> prompt;
    Nanos begun = 0, needed_at = 0;
    uint64_t begun_at_step = 0;
    bool drains = false;                      // whether the cache was draining when it began
    std::unique_ptr<storage::Search> search;  // refers to the members above
  };
  struct Closing {
    SessionId session;
    std::function<void()> drained;
  };
  struct Landing {
    SessionId session;
    std::vector<Text> texts;  // landed segments; empty if `asked` is set
    std::optional<Asked> asked;
    LeaseId lease{};
    bool cancelled = false;
    std::unique_ptr<TestPages> pages;
  };
  struct Composing {
    SessionId session;
    std::vector<Text> texts;
    uint32_t layer = 0;
    bool cancelled = false;
    std::shared_ptr<std::vector<float>> state;
  };
  struct Commit {
    SessionId session;
    bool refused = false;  // must be refused: it is called exact, but is not
    bool spanning = false;
  };
  // The pages that one tenant's engines share, as allocated by their daemon.
  struct Region {
    TestPages memory;
    std::shared_ptr<PagePool> pool;  // null: not declared
  };
  struct Request {
    SessionId session;
    TenantId tenant;
    std::vector<Text> texts;
    float mark = 0;  // value on each of its own pages
    uint64_t own = 0;
  };
  struct Filling {  // filling of shared pages by a landing
    TenantId tenant;
    LeaseId request;
    size_t segment = 0;  // index of the segment in the request
    Text text;
    std::vector<storage::PageId> pages;
  };

  static Sizes DrawSizes(uint64_t seed);
  void Fail(const std::string& what) {
    if (report_.failure.empty()) report_.failure = what;
  }
  void Trace(uint64_t value) { report_.trace = (report_.trace ^ value) * 0x100000001B3; }
  void Reach(Event event) { ++report_.reached.counts[static_cast<size_t>(event)]; }

  Cache& cache() { return *world_.cache; }
  uint64_t Draw(uint64_t below) { return world_.Draw(below); }
  template <typename Container>
  auto Any(Container& container) {
    return std::next(container.begin(), static_cast<ptrdiff_t>(Draw(container.size())));
  }
  SessionId AnySession() { return *Any(sessions_); }
  static TenantId TenantOf(SessionId session) { return 1 + session % 2; }
  static bool Rebuilds(SessionId session) { return session % 3 != 0; }  // states from spans
  // Draws the time to compute a text, as declared by its engine; usually none.
  Nanos AnyRecompute() { return Draw(4) == 0 ? 1 + static_cast<Nanos>(Draw(kDeadline / 6)) : 0; }
  // Draws the time at which a lookup's texts are needed; usually now.
  Nanos AnyNeed() { return Draw(4) == 0 ? world_.clock.Now() + static_cast<Nanos>(Draw(kDeadline)) : 0; }
  Text AnyText(TenantId tenant) { return {tenant, 1 + Draw(kTexts)}; }
  ConversationId AnyConversation() {
    return Draw(2) == 0 ? ConversationId{static_cast<uint8_t>(1 + Draw(kConversations))} : ConversationId{};
  }

  void Open();
  void Step();

  // Segments.
  void Reserve();
  void Publish();
  void Published(SessionId session, storage::ReservationId id, PublishOutcome outcome);
  void Abandon();
  Asked AnyPrompt(SessionId session);
  void Attach();
  void Land();
  void LandText(Lease& lease);
  LandingId StartLanding(Landing landing, storage::LandTarget target);
  void Landed(LandingId number, const std::vector<MissReason>& verdict);
  void Quiesce();
  void Used(const LeaseId& lease, bool composed);

  // Calls in slices (driver_slices.cc).
  storage::Slice AnySlice();
  void Lookup();
  void GoOnSearching(std::list<Searching>::iterator searching);
  void Searched(Searching& searching, Match match);
  void Release();
  void Close(SessionId session, const std::function<void()>& drained);
  void Tick();
  void GoOn();
  void NoteEnded();
  bool SomethingEnds() const;
  void EndSlices();
  void DropSlices();

  // Exact prefixes (driver_prompts.cc).
  void LandPrefix(Lease& lease);
  void LandedPrefix(const Landing& landing, const std::vector<MissReason>& verdict);
  void CommitText();
  void Committed(uint64_t number, const std::vector<CommitOutcome>& outcomes);
  void Remember(TenantId tenant, const storage::PrefixCommit& commit);

  // Compositions (driver_compositions.cc).
  void Compose();
  void Composed(LandingId number, const storage::CompositionVerdict& verdict);

  // Pages that requests share in place (driver_pages.cc).
  void Declare();
  void Declare(TenantId tenant);
  void Admit();
  void Extend();
  void Fill();
  // False: it is not stored.
  bool FillFromCache(const LeaseId& name, size_t segment, const Text& text, std::vector<storage::PageId> pages);
  void Filled(LandingId number, const std::vector<MissReason>& verdict);
  void EndRequest();
  void EndRequestsOf(SessionId session);
  void MarkOwnPages(const LeaseId& name);
  void CheckRefusal(TenantId tenant, const std::vector<PagePool::Want>& wants, const PagePool::Shortage& shortage);
  void CheckPages();
  void ConcludePages();

  // Operators' work on many objects (driver_upkeep.cc).
  void Erase();
  void GoOnErasure();
  bool IsThere(const Text& text);
  void CheckErased();
  void Verify();
  uint64_t Damaged();
  void CheckDamage();
  void ConcludeUpkeep();

  // The whole cache, and its disk.
  void Die();
  void Advance();
  void SetFaults();
  void Crash();
  void Operate();
  void OperateOnPrefix();
  void Execute();
  void HangDisk();
  void OutlastHang();

  // The oracle (oracle.cc). `used`: a lookup found it, or it was offered again, at that time or later. None: the use
  // may not count.
  void CheckHit(const Text& text, const Found& found, std::optional<Nanos> used);
  void CheckNotErased(const Text& text, uint64_t begun_at_step);
  void CheckUse(const Text& text, std::optional<Nanos> used);
  bool Leased(const Text& text);
  bool InUse(const Text& text);
  void CheckMiss(const Text& text, MissReason reason, Nanos recompute = 0);
  void CheckPrefix(const Lease& lease, const Match& match, size_t queries);
  bool IsPast(const std::map<Text, Nanos>& used, const Text& text) const;
  bool IsThereTooLong(const Text& text);
  void CheckDeadlines();
  void CheckExpired();
  void NoteFaults();
  void Note(Fault fault);
  void CheckBudgets();
  void CheckLeases();
  void CheckSpace(TenantId tenant, uint64_t extents);
  uint64_t InFlight(TenantId tenant) const;
  bool MayBegin(TenantId tenant) const;  // true only if it certainly can
  void CheckTurns();
  void RunAll();
  void CheckWrittenAgain();
  void Conclude();

  bool Corrupted(TenantId tenant) const { return world_.disk.counts().bit_flips > 0 || half_erased_.contains(tenant); }
  bool TierFailed() const { return hung_ || !world_.observer.tier_errors.empty(); }
  Nanos DeadlineOf(const Reservation& reservation) const;
  bool SomethingIsOverdue();

  World world_;
  Report report_;
  Features features_;
  std::vector<Operation> operations_;
  uint64_t weight_ = 0;       // total weight
  std::set<Text> published_;  // since the start
  uint64_t publishes_ = 0;
  SessionId next_session_ = 1;
  LandingId next_landing_ = 1;
  std::vector<SessionId> sessions_;
  std::vector<Reservation> reservations_;
  std::map<SessionId, Nanos> progress_;  // the last publish of each session
  std::vector<Lease> leases_;
  std::list<Searching> searches_;
  std::vector<SessionId> releasing_;  // sessions whose ended leases still have references
  std::vector<Closing> closing_;
  bool ticks_ = false, ticked_in_parts_ = false;
  std::map<LandingId, Landing> landings_;
  std::map<LandingId, Composing> compositions_;
  uint64_t draining_ = 0;
  std::map<uint32_t, TenantId> arena_tenants_;
  storage::SimulatedDisk::Counts seen_;
  uint64_t seen_refused_ = 0;
  std::set<Text> operator_evicted_;
  std::set<Text> declined_;     // since the start
  std::map<Text, Nanos> pins_;  // keyed by text: when the pin ends
  // Time of the last lookup, publish or offer; and the latest one that surely counts.
  std::map<Text, Nanos> used_, surely_used_;
  bool drains_ = false;
  bool hung_ = false;  // whether the disk ever hung

  std::map<TenantId, storage::OfferedPrefixes> offered_;
  std::map<TenantId, std::deque<Prompts::Offer>> talks_;  // the latest that were committed
  std::deque<std::pair<TenantId, Key>> written_;          // objects of the latest commits
  std::set<std::pair<TenantId, Key>> pinned_prefixes_;    // pinned by the operator
  bool evicted_prefixes_ = false;                         // whether the operator evicted some
  std::map<uint64_t, Commit> commits_;                    // commits in progress
  uint64_t next_commit_ = 1;

  std::shared_ptr<storage::Erasure> erasure_;  // null: none
  TenantId erases_ = 0;                        // the erased tenant
  bool erased_is_gone_ = false;
  std::set<TenantId> half_erased_;   // a crash came first, and objects may be partly overwritten
  std::set<Text> republished_;       // since it began
  std::map<Text, uint64_t> erased_;  // erased permanently and not published since: at which step

  std::map<TenantId, Region> regions_;
  std::map<LeaseId, Request> requests_;
  std::map<LandingId, Filling> fillings_;
  uint64_t next_request_ = 1;
};

}  // namespace ashlar::simulation
