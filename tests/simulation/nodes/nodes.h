// SPDX-License-Identifier: Apache-2.0
// Several nodes of a cluster in simulated time: caches, directories, peers, routers and the data plane's protocol as
// the daemon has them, over a simulated network, clocks and an etcd, against an oracle. A failure is a seed.
//
// The same code runs as in a daemon: storage, EtcdDirectory with its session, queue and mirror, Peers with all of its
// parts, Router, EventLoop, and Transport with its Exchange. The layers below are simulated: the calls of etcd's API
// (etcd.h), the connections of the data plane (fabric.h), the calls between daemons as messages (calls.h), and workers.
// Left out: gRPC, TLS, UCX, the greetings and back-off of PeerClient and PeerServer, threads, disks.
//
// Engines of two tenants publish, look up, land, evict, plan prefills and serve them, on every node. At any moment a
// node is killed, stops normally, freezes, or restarts; links are cut in one direction or both, slow, and lose or
// reorder messages; bits flip in transit; etcd is down, slow, compacted, or loses everything; machines' clocks are
// years apart, and run at different rates. A node may not share a tenant with another one, and calls may find no space.
//
// The oracle: bytes that land are those that the tenant published under the key; a failure only causes misses; every
// wait ends by its deadline, and a drain ends if nothing blocks it; two lease periods after the last fault every node
// knows exactly the members and what they hold; and in the end there are no leases, fetches or grants, and etcd has no
// keys of nodes that are gone.
//
//   ASHLAR_NODES_SEEDS=2000 ASHLAR_NODES_PROGRESS=seeds.txt ASHLAR_NODES_PART=200
//   nodes_simulation_test --gtest_filter='*EverySeed*'
// Each call continues where the previous one ended or was killed, as recorded in the file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ashlar::simulation::nodes {

// Planted bugs of the simulator, to show that the oracle detects each of them.
enum class Bug : uint8_t {
  kNone,
  kFlipsLandedBits,     // landed data changes before the engine reads it
  kPublishesOtherText,  // an engine publishes another text's bytes under a key
  kCrossesTenants,      // a tenant's landing gets what another tenant published
  kSharesExtents,       // memory of an object that is leased is given to another one
  kNeverEndsLeases,     // etcd's leases outlive their time
  kLosesWatchEvents,    // etcd does not report some changes
  kLosesTransactions,   // etcd acknowledges writes that it has not made
  kKeepsDeletedKeys,    // etcd acknowledges deletions that it has not made
  kComesBackAsItself,   // a restarted node draws its previous incarnation
  kDropsCalls,          // a peer's call is never answered, and no timeout ends it
  kKeepsPeersGone,      // the end of a peer is not reported, and no timeout ends what it holds
  kDropsSends,          // a send of the data plane is never completed
  kDropsDeadlines,      // deadlines of lookups, leases and offers are not checked
  kStopsClocks,         // a machine's clock stops
  kNeverTakesOffers,    // nodes always report that they are too busy for an offer
  kServesFormerNodes,   // a restarted node is served as its first incarnation
};
inline constexpr size_t kBugs = 17;

// Events that must have happened somewhere in many seeds, so that the promises about them were tested.
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
  kDrainTransferred,
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
  uint64_t trace = 0;  // a hash of all events: the same for the same seed
  uint64_t events = 0;
  Reached reached;
};

Report Simulate(uint64_t seed, Bug bug = Bug::kNone);

}  // namespace ashlar::simulation::nodes
