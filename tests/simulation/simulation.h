// SPDX-License-Identifier: Apache-2.0
// The cache on a simulated clock, executors and disk, with random clients of two tenants, against an oracle. A failure
// is a seed.
//
// Events, in drawn orders of calls and completions:
// - Engines look up segments and prompts, reserve, publish, abandon, commit texts (exact and composed, with
//   conversations and spans), land segments and prefixes, compose, attach, give up, release, and die with all of that
//   open. They declare pages, admit requests to them, fill segments for each other, from the cache or themselves, take
//   more pages, and end requests whose landings continue. Operators pin, evict and drain.
// - Look-ups, releases, ends of sessions and ticks go in slices, with any other call between two of them.
// - Work begins in turn between tenants, on one thread or many, and ends in any order; executors refuse work because
//   their queues are full. Work that may make way for others does so at drawn moments.
// - Time passes before anybody notices overdue items: leases that were never used, reservations, pins, and objects
//   that have a time to live.
// - The disk fails as storage/testing/simulated_disk.h says: reads, writes, syncs and records fail, bits flip in the
//   bytes read, it is full or runs full inside a write, it hangs, and power fails at any point, after which only synced
//   bytes are certain.
// - The daemon is killed: memory tiers are lost.
// Not simulated: memory that changes by itself (storage/cache_faults_test.cc flips its bits), a disk that lies about an
// acknowledged sync (Bug::kLosesFlushes shows that the oracle would see it), and a process that runs out of memory.
// The daemon's own tests cover its work between two calls, for sessions and on the wire.
//
// The oracle holds the cache to the promises of docs/concepts.md: bytes landed, composed or shared in place are those
// published; nothing crosses tenants or conversations, and nothing is found that was not offered; leased data and
// requests' pages stay, and data that nobody holds never blocks; budgets hold at every step; overdue items end, and
// nothing else does; no tenant's work waits while more of another's begins than its turn; acknowledged objects are
// there after a crash, and erased ones are not; nobody waits for a disk that hangs; a disk that is well again is
// written again by itself; and every call is answered, once.
//
// A run of many seeds in parts, on a machine that is needed for other things meanwhile:
//   ASHLAR_SIMULATION_SEEDS=20000 ASHLAR_SIMULATION_PROGRESS=seeds.txt ASHLAR_SIMULATION_PART=2000
//   simulation_test --gtest_filter='*EverySeed*'
// Each call continues where the file says that the last one ended, or was killed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/objects/copy_state.h"

namespace ashlar::simulation {

// Mistakes that the simulator makes on purpose, to show that the oracle sees each of them.
enum class Bug {
  kNone,
  kFlipsLandedBits,         // promise 1: what was landed changes before the engine reads it
  kCrossesTenants,          // promise 2: a tenant gets memory of another one
  kSharesExtents,           // promise 3: two objects get the same memory
  kNeverFrees,              // promise 3: what is given up still blocks
  kIgnoresBudgets,          // promise 4
  kLosesFlushes,            // promise 5: the disk acknowledges what it has not written
  kDropsCompletions,        // promise 6: work ends, and nobody is told
  kCommitsOtherStates,      // promise 1: another prefix's states are stored under a prefix
  kShiftsSpans,             // promise 1: a span begins a token too early
  kMixesConversations,      // promise 2: a conversation's states are stored under another one's name
  kComposesInAnotherOrder,  // promise 8
  kWritesRefusedStates,     // promise 8: a composition that cannot be had is begun all the same
  kErasesPagePins,          // promise 3: pages are given to others while a landing still writes to them
  kErasesDeadlines,         // overdue items stay
  kExpiresEarly,            // objects within their time to live end
  kServesInOrder,           // promise 9: work begins in the order in which it came, whosever it is
  kIgnoresShares,           // promise 9: a tenant may have any number of calls in flight
  kDropsSlices,             // promise 6: a call that was begun in slices is not gone on with
  kRefusesProbes,           // promise 10: a disk that is well again refuses what is tried on it
  kErasesTooEarly,          // what is to be erased is acknowledged before the disk has done so
  kHidesHangs,              // promise 10: nobody is told that the disk hangs
};

enum class Fault : uint8_t {
  kReadError,
  kWriteError,
  kSyncError,
  kRecordError,
  kBitFlip,
  kDiskFull,
  kCrash,
  kQueueFull,
  kEngineDeath,
  kNoSpace,  // inside a write
  kHang,     // of the disk
};
inline constexpr size_t kFaults = 11;
// The work under way when a fault struck.
enum class State : uint8_t {
  kLeased,
  kReserved,
  kPublishing,
  kLanding,
  kCopying,
  kDraining,
  kCommitting,
  kSpanning,  // committing with a span
  kComposing,
  kAdmitted,    // requests hold pages of hosted regions
  kFilling,     // a landing fills some of them
  kExpiring,    // something is overdue, and nobody has noticed yet
  kEvacuating,  // the cache drains, as before its end
};
inline constexpr size_t kStates = 13;
// Events that must have happened somewhere in many seeds, so that the promises about them were tested at all.
enum class Event : uint8_t {
  kPrefixLanded,  // a namespace's
  kOwnLanded,     // a conversation's
  kSpanLanded,
  kKept,
  kKeptAsSpan,
  kComposed,
  kNotComposed,  // an interior could not be had
  kPagesFilled,  // from the cache
  kPagesShared,
  kPagesReclaimed,
  kExpired,
  kErased,  // a tenant, for good
};
inline constexpr size_t kEvents = 12;

// Counts how often each fault struck in each state.
struct Coverage {
  std::array<std::array<uint64_t, kStates>, kFaults> pairs{};
  void Add(const Coverage& other);
  std::string Missing() const;  // names of pairs that never happened
};

struct Reached {
  std::array<uint64_t, kEvents> counts{};
  void Add(const Reached& other);
  std::string Missing() const;   // names of events that never happened
  std::string Describe() const;  // how often each event happened
};

// Counts how often each transition of an object's copy was taken (storage/objects/copy_state.h).
struct Transitions {
  storage::CopyTransitionCounts counts{};
  void Add(const Transitions& other);
  std::string Missing() const;  // transitions that were never taken and that the simulation can take
};

struct Report {
  std::string failure;  // empty: every promise was kept
  uint64_t step = 0;    // at which it was broken
  uint64_t trace = 0;   // a hash of all that happened: the same for the same seed
  Coverage coverage;
  Reached reached;
  Transitions transitions;
};

Report Simulate(uint64_t seed, int operations, Bug bug = Bug::kNone);

}  // namespace ashlar::simulation
