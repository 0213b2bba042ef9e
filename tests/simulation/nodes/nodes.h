// SPDX-License-Identifier: Apache-2.0
// Several nodes of a cluster in simulated time: caches, directories, peers, routers and the data plane's protocol as
// the daemon has them, over a simulated network, clocks and an etcd, against an oracle. A failure is a seed.
//
// The same code runs as in a daemon: storage, EtcdDirectory with its session, queue and mirror, Peers with all of its
// parts, Router, EventLoop, and Transport with its Exchange. Simulated are what lies below them: the calls of etcd's
// API (etcd.h), the connections of the data plane (fabric.h), the calls between daemons as messages (calls.h), and
// workers. Left out: gRPC, TLS, UCX, the greetings and back-off of PeerClient and PeerServer, threads, disks.
//
// Engines of two tenants publish, look up, land, evict, plan prefills and serve them, on every node. At any moment a
// node is killed, stops as it should, stands still, or is started again; links are cut in one direction or both, slow,
// and lose or reorder messages; bits change on their way; etcd is down, slow, compacted, or loses everything; machines'
// clocks are years apart, and go at different rates. A node may not share a tenant with another one, and calls may find
// no room.
//
// The oracle: bytes that land are those that the tenant published under the key; nothing but a miss comes of a failure;
// every wait ends by its deadline, and a drain where nothing is in its way; two lease periods after the last fault
// every node knows all members and what they hold, and nothing else; and in the end nobody leases, fetches, or is
// granted anything, and etcd has no keys of nodes that are gone.
//
//   ASHLAR_NODES_SEEDS=2000 ASHLAR_NODES_PROGRESS=seeds.txt ASHLAR_NODES_PART=200
//   nodes_simulation_test --gtest_filter='*EverySeed*'
// Each call continues where the file says that the last one ended, or was killed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ashlar::simulation::nodes {

// Mistakes that the simulator makes on purpose, to show that the oracle sees each of them.
enum class Bug : uint8_t {
  kNone,
  kFlipsLandedBits,     // what was landed changes before the engine reads it
  kPublishesOtherText,  // an engine publishes another text's bytes under a key
  kCrossesTenants,      // a tenant's landing is given what another one published
  kSharesExtents,       // memory of an object that is leased is given to another one
  kNeverEndsLeases,     // etcd's leases outlive their time
  kLosesWatchEvents,    // etcd does not tell of some changes
  kLosesTransactions,   // etcd says that it has written what it has not
  kKeepsDeletedKeys,    // etcd says that it has deleted what it has not
  kComesBackAsItself,   // a node that was started again draws the incarnation that it had
  kDropsCalls,          // a call of a peer is never answered, and nobody's time ends it
  kKeepsPeersGone,      // nobody is told that a peer has gone, and no time ends what it holds
  kErasesSends,         // a send of the data plane is never completed
  kErasesDeadlines,     // nobody looks at the deadlines of look-ups, leases and offers
  kStopsClocks,         // a machine's clock stands still
  kNeverTakesOffers,    // nodes say of every offer, for ever, that they are busy
  kServesFormerNodes,   // a node that was started again is served as the one that it was first
};
inline constexpr size_t kBugs = 17;

// Events that must have happened somewhere in many seeds, so that the promises about them were tested at all.
enum class Event : uint8_t {
  kKilled,
  kStoppedWell,
  kStartedAgain,
  kStoodStill,
  kCut,
  kCutOneWay,
  kSlowed,
  kLostMessages,
  kFlippedBits,
  kEtcdDown,
  kEtcdEmptied,
  kEtcdCompacted,
  kEtcdSlow,
  kLeaseExpired,
  kResynced,
  kSwept,
  kLandedHere,
  kLandedRemote,
  kLandedBundle,
  kMissedPeerFailed,
  kMissedChecksum,
  kLateLookup,
  kJoinedLookup,
  kMoved,
  kHedged,
  kHedgeWon,
  kEvictedUnderFetch,
  kHandedOver,
  kReplicated,
  kPeerLeaseExpired,
  kPrefilledHere,
  kPrefilledElsewhere,
  kPrefillGivenBack,
  kCallNotShared,
  kCallRefusedBusy,
};
inline constexpr size_t kEvents = 35;

struct Reached {
  std::array<uint64_t, kEvents> counts{};
  void Add(const Reached& other);
  std::string Missing() const;   // names of events that never happened
  std::string Describe() const;  // how often each event happened
};

struct Report {
  std::string failure;  // empty: every promise was kept
  double at_seconds = 0;
  uint64_t trace = 0;  // a hash of all that happened: the same for the same seed
  uint64_t events = 0;
  Reached reached;
};

Report Simulate(uint64_t seed, Bug bug = Bug::kNone);

}  // namespace ashlar::simulation::nodes
