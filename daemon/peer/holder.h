// SPDX-License-Identifier: Apache-2.0
// Holder: serves this node's objects to other nodes. It leases objects to them, locates the bytes for the transport,
// and revokes everything when a node disconnects.
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

// The leases of a node are those of one cache session per tenant, with the limits of any session. A leased object stays
// in its tier until it is closed, its lease expires, or its node disconnects, and then until none of its bytes are in
// transfer. Objects that are only on a GPU are sent from there if the transport reaches GPU memory. The metadata thread
// only, unless noted.
class Holder {
 public:
  struct Options {
    size_t leases_of_a_node = 65536;
    // Called for each object given to a node, with the node's name. May be empty.
    std::function<void(const std::string& node, storage::TenantId tenant, const Key& key)> gave;
    // Returns whether other nodes may get objects now. Empty: always.
    std::function<bool()> gives;
  };
  struct Stats {
    uint64_t leases = 0, nodes = 0;
    uint64_t opened = 0, missed = 0;  // objects, since the start
    uint64_t expired = 0;             // leases that were neither closed nor renewed
  };

  // All must outlive the object. `tiers` are the memory tiers, indexed by the numbers of their arenas
  // (storage::kArenasApart).
  Holder(EventLoop& loop, const storage::Clock& clock, Transport& transport, storage::Cache& cache,
         std::vector<const storage::Tier*> tiers, const Options& options)
      : loop_(loop), clock_(clock), transport_(transport), cache_(cache), tiers_(std::move(tiers)), options_(options) {}
  // Registers a tier's arenas with the transport: their memory type, and how bytes get there. Peers may read them by
  // RDMA if the transport supports it. Arenas in memory that the transport cannot reach are skipped.
  static void RegisterArenas(Transport& transport, storage::MemoryTier& tier);
  // Everything must have been closed, and the transport destroyed.
  ~Holder() = default;

  // Looks up objects for a node. The request must be well-formed, and the tenant shared with the node. One step per
  // object.
  bool Open(const std::string& node, storage::TenantId tenant, const PeerOpen& open, std::vector<PeerOpened>& opened,
            storage::Slice& slice);
  // Returns the remaining lease time in milliseconds; 0 without a lease.
  uint32_t Renew(const std::string& node, const PeerLease& lease, uint32_t lease_ms);
  void Close(const std::string& node, const PeerLease& lease);
  void Gone(const std::string& node);
  void CloseAll();
  // Ends expired leases. Call it about once per second.
  void Tick();
  Stats stats() const;
  struct OfNode {
    uint64_t leases = 0, bytes = 0;  // objects that it holds here now
    uint64_t given = 0;              // bytes sent to it, since the start
  };
  // Key: node name.
  std::map<std::string, OfNode> ByNode() const;
  // Name and incarnation of each connected node that has opened objects.
  std::vector<std::string> Readers() const;
  // Drops the sent-bytes counters of nodes that are not in `nodes` and hold nothing.
  void Keep(const std::set<std::string>& nodes);

 private:
  class Bytes;  // the bytes under a grant
  // Ends with its last lease after its node has disconnected.
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
    uint64_t bytes = 0;  // size of the object
    storage::Nanos ends_at = 0;
  };
  struct Node {
    std::map<storage::TenantId, std::shared_ptr<Session>> sessions;
    std::map<PeerLease, Lease> leases;
    uint64_t bytes = 0;  // bytes of the leased objects
    std::shared_ptr<std::atomic<uint64_t>> given;
  };

  MissReason OpenOne(Node& node, storage::TenantId tenant, const storage::Query& query, uint32_t lease_ms,
                     PeerOpened& opened);
  void End(const Lease& lease);
  void CloseIfGone(const Session& session);

  static constexpr storage::SessionId kFirstSession = storage::SessionId{1} << 62;  // engine sessions count from 1

  EventLoop& loop_;
  const storage::Clock& clock_;
  Transport& transport_;
  storage::Cache& cache_;
  const std::vector<const storage::Tier*> tiers_;
  const Options options_;
  std::map<std::string, Node> nodes_;                                    // key: name and incarnation
  std::map<std::string, std::shared_ptr<std::atomic<uint64_t>>> given_;  // key: node name
  storage::SessionId next_session_ = kFirstSession;
  Stats stats_;
};

}  // namespace ashlar::daemon
