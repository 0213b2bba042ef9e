// SPDX-License-Identifier: Apache-2.0
// The cache on a simulated clock, executors and disk, with random clients of two tenants, against an oracle. A failure
// is a seed.
//
// Events, in drawn orders of calls and completions:
// - Engines look up segments and prompts, reserve, publish, abandon, commit texts (exact and composed, with
//   conversations and spans), land segments and prefixes, compose, attach, abandon requests, release, and die with all
//   of that open. They declare pages, admit requests to them, fill segments for each other, from the cache or
//   themselves, take more pages, and end requests whose landings continue. Operators pin, evict and drain.
// - Lookups, releases, ends of sessions and ticks run in slices, with any other call between two of them.
// - Work begins in turn between tenants, on one thread or many, and ends in any order; executors refuse work because
//   their queues are full. Work that can be preempted is preempted at drawn moments.
// - Time passes before the cache ends overdue items: leases that were never used, reservations, pins, and objects that
//   have a time to live.
// - The disk fails as storage/testing/simulated_disk.h says: reads, writes, syncs and records fail, bits flip in the
//   bytes read, it is full or runs full inside a write, it hangs, and power fails at any point, after which only synced
//   bytes are certain.
// - The daemon is killed: memory tiers are lost. Not simulated: bit flips in memory
//   (storage/tests/cache_faults_test.cc), a disk that lies about an acknowledged sync (Bug::kLosesFlushes shows that
//   the oracle would detect it), and a process that runs out of memory. The daemon's own tests cover its work between
//   two calls, for sessions and on the wire.
//
// The oracle checks the promises of docs/concepts.md: bytes landed, composed or shared in place are the published ones;
// nothing crosses tenants or conversations, and only offered objects are found; leased data and requests' pages stay,
// and data without holders never blocks; budgets hold at every step; exactly the overdue items end; no tenant's work
// waits while another tenant begins more than its turn; after a crash acknowledged objects exist, and erased ones do
// not; nothing waits for a disk that hangs; a recovered disk is written again by itself; and every call is answered
// once.
//
// A seed repeats all calls and completions. Faults of writes to the disk may differ between two runs: one write covers
// extents of two arenas if the kernel has mapped the arenas next to each other.
//
// A run of many seeds in parts, on a machine that also does other work:
//   ASHLAR_SIMULATION_SEEDS=20000 ASHLAR_SIMULATION_PROGRESS=seeds.txt ASHLAR_SIMULATION_PART=2000
//   simulation_test --gtest_filter='*EverySeed*'
// Each call continues where the previous one ended or was killed, as recorded in the file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/objects/copy_state.h"

namespace ashlar::simulation {

// Planted bugs of the simulator, to show that the oracle detects each of them.
enum class Bug {
  kNone,
  kFlipsLandedBits,         // promise 1: landed data changes before the engine reads it
  kCrossesTenants,          // promise 2: a tenant gets memory of another one
  kSharesExtents,           // promise 3: two objects get the same memory
  kNeverFrees,              // promise 3: released space still blocks
  kIgnoresBudgets,          // promise 4
  kLosesFlushes,            // promise 5: the disk acknowledges what it has not written
  kDropsCompletions,        // promise 6: work ends without being reported
  kCommitsOtherStates,      // promise 1: another prefix's states are stored under a prefix
  kShiftsSpans,             // promise 1: a span begins a token too early
  kMixesConversations,      // promise 2: a conversation's states are stored under another one's name
  kComposesInAnotherOrder,  // promise 8
  kWritesRefusedStates,     // promise 8: an impossible composition begins nevertheless
  kDropsPagePins,           // promise 3: pages are given to others while a landing still writes to them
  kDropsDeadlines,          // overdue items stay
  kExpiresEarly,            // objects within their time to live end
  kServesInOrder,           // promise 9: work begins in the order of arrival, regardless of tenant
  kIgnoresShares,           // promise 9: a tenant may have any number of calls in flight
  kDropsSlices,             // promise 6: a call that was begun in slices is not continued
  kRefusesProbes,           // promise 10: a recovered disk refuses its probes
  kErasesTooEarly,          // an erasure is acknowledged before the disk has done so
  kHidesHangs,              // promise 10: a hang of the disk is not reported
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
  kHang,     // the disk hangs
};
inline constexpr size_t kFaults = 11;
// The work in progress when a fault struck.
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
  kExpiring,    // something is overdue, and not processed yet
  kEvacuating,  // the cache drains, as before its end
};
inline constexpr size_t kStates = 13;
// Events that must have happened somewhere in many seeds, so that the promises about them were tested.
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
  kErased,  // a tenant, completely
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
  std::string Missing() const;  // reachable transitions that were never taken
};

struct Report {
  std::string failure;  // empty: every promise was kept
  uint64_t step = 0;    // at which it was broken
  uint64_t trace = 0;   // a hash of all events: the same for the same seed
  Coverage coverage;
  Reached reached;
  Transitions transitions;
};

Report Simulate(uint64_t seed, int operations, Bug bug = Bug::kNone);

}  // namespace ashlar::simulation
