// SPDX-License-Identifier: Apache-2.0
// Holder: this node as other nodes see it. It leases objects to them, says where the bytes lie that the transport
// sends, and takes all back when a node has gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::daemon {

// A node's leases are a session's of the cache for each tenant, within the bounds of any session. What is leased stays
// in its tier until it is closed, its time is over, or its node has gone; and then until no byte of it moves any more.
// Objects that lie on a GPU alone are sent from there, if the transport reaches GPUs' memory.
// The metadata thread only, but for the calls that say otherwise.
class Holder {
 public:
  struct Options {
    size_t leases_of_a_node = 65536;
    // Is told of each object that a node was given; the node's name alone. May be empty.
    std::function<void(const std::string& node, storage::TenantId tenant, const Key& key)> gave;
    // Returns whether other nodes are given objects at present. Empty: always.
    std::function<bool()> gives;
  };
  struct Stats {
    uint64_t leases = 0, nodes = 0;
    uint64_t opened = 0, missed = 0;  // objects, ever
    uint64_t expired = 0;             // leases that their nodes neither closed nor renewed
  };

  // All must outlive it. `tiers`: those of the cache's memory, by the numbers of their arenas (storage::kArenasApart).
  Holder(EventLoop& loop, const storage::Clock& clock, Transport& transport, storage::Cache& cache,
         std::vector<const storage::Tier*> tiers, const Options& options)
      : loop_(loop), clock_(clock), transport_(transport), cache_(cache), tiers_(std::move(tiers)), options_(options) {}
  // For each of the tiers: the transport learns of its arenas, of what type of memory they are, and how bytes get
  // there. Peers' cards may read them where they lie, if the transport's do. Nothing of a tier whose memory is not
  // reached.
  static void RegisterArenas(Transport& transport, storage::MemoryTier& tier);
  // Everything must have been taken back (Close), and the transport must be gone.
  ~Holder() = default;

  // Looks objects up for a node of which so much has been checked that the request is well-formed and the tenant is
  // shared with it. A step for each object.
  bool Open(const std::string& node, storage::TenantId tenant, const PeerOpen& open, std::vector<PeerOpened>& opened,
            storage::Slice& slice);
  // Returns how long the lease lives on, in milliseconds; 0: there is none.
  uint32_t Renew(const std::string& node, const PeerLease& lease, uint32_t lease_ms);
  void Close(const std::string& node, const PeerLease& lease);
  void Gone(const std::string& node);
  void CloseAll();
  // Ends what is past its time. Call it about once a second.
  void Tick();
  Stats stats() const;
  struct OfNode {
    uint64_t leases = 0, bytes = 0;  // of objects that it holds here now
    uint64_t given = 0;              // bytes that were sent to it, ever
  };
  // By the nodes' names.
  std::map<std::string, OfNode> ByNode() const;
  // Name and incarnation of each node that has asked and has not gone.
  std::vector<std::string> Readers() const;
  // Erases how much was sent to nodes that are not among these, and hold nothing.
  void Keep(const std::set<std::string>& nodes);

 private:
  class Bytes;  // behind a grant
  // Ends with the last of its leases, once its node has gone.
  struct Session {
    storage::SessionId id = 0;
    size_t leases = 0;
    bool gone = false;
  };
  struct Lease {
    std::shared_ptr<Session> session;
    storage::TenantId tenant = 0;
    storage::LeaseId lease{};
    uint64_t grant = 0;
    uint64_t bytes = 0;  // of the object
    storage::Nanos ends_at = 0;
  };
  struct Node {
    std::map<storage::TenantId, std::shared_ptr<Session>> sessions;
    std::map<PeerLease, Lease> leases;
    uint64_t bytes = 0;  // of the leases' objects
    std::shared_ptr<std::atomic<uint64_t>> given;
  };

  MissReason OpenOne(Node& node, storage::TenantId tenant, const storage::Query& query, uint32_t lease_ms,
                     PeerOpened& opened);
  void End(const Lease& lease);
  void CloseIfGone(const Session& session);

  static constexpr storage::SessionId kFirstSession = storage::SessionId{1} << 62;  // engines' are counted from 1

  EventLoop& loop_;
  const storage::Clock& clock_;
  Transport& transport_;
  storage::Cache& cache_;
  const std::vector<const storage::Tier*> tiers_;
  const Options options_;
  std::map<std::string, Node> nodes_;                                    // by name and incarnation
  std::map<std::string, std::shared_ptr<std::atomic<uint64_t>>> given_;  // by name
  storage::SessionId next_session_ = kFirstSession;
  Stats stats_;
};

}  // namespace ashlar::daemon
