// The cache on a simulated clock, executors and disk, with random clients, against an oracle. A failure is a seed.
//
// The fault model. What may happen, at any moment and in any order:
// - Engines look up, reserve, publish, abandon, land, give up, release, and die with all of that open;
//   operators pin and evict.
// - Work that was queued ends in any order, and executors refuse work because their queues are full.
// - The disk fails as storage/testing/simulated_disk.h says: reads, writes, syncs and records fail, bits flip in what
// is
//   read, it is full, and power fails at any point, after which only what was synced is certain.
// - The daemon is killed: memory tiers are lost.
// What does not happen: memory changes by itself (storage/cache_faults_test.cc flips its bits), a disk that
// acknowledged a sync lies (Bug::kLosesFlushes shows that it would be seen), the process runs out of memory.
//
// What the oracle holds the cache to are the promises of docs/architecture.md: bytes landed are those published;
// nothing crosses tenants; leased data stays, and what nobody holds never blocks; budgets hold at every step; what was
// acknowledged is there after a crash; and every call is answered, once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ashlar::simulation {

// Mistakes that the simulator makes on purpose, to show that the oracle sees each of them.
enum class Bug {
  kNone,
  kFlipsLandedBits,   // promise 1: what was landed changes before the engine reads it
  kCrossesTenants,    // promise 2: a tenant gets memory of another one
  kSharesExtents,     // promise 3: two objects get the same memory
  kNeverFrees,        // promise 3: what is given up still blocks
  kIgnoresBudgets,    // promise 4
  kLosesFlushes,      // promise 5: the disk acknowledges what it has not written
  kDropsCompletions,  // promise 6: work ends, and nobody is told
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
};
inline constexpr size_t kFaults = 9;
// What was under way when a fault struck.
enum class State : uint8_t { kLeased, kReserved, kPublishing, kLanding, kCopying, kDraining };
inline constexpr size_t kStates = 6;

// How often each fault struck in each state.
struct Coverage {
  std::array<std::array<uint64_t, kStates>, kFaults> pairs{};
  void Add(const Coverage& other);
  std::string Missing() const;  // names of pairs that never happened
};

struct Report {
  std::string failure;  // empty: every promise was kept
  uint64_t step = 0;    // at which it was broken
  uint64_t trace = 0;   // a hash of all that happened: the same for the same seed
  Coverage coverage;
};

Report Simulate(uint64_t seed, int operations, Bug bug = Bug::kNone);

}  // namespace ashlar::simulation
