// SPDX-License-Identifier: Apache-2.0
// Directory: which objects the other nodes of the cluster hold. One node has a LocalDirectory; many have an
// EtcdDirectory each.
//
// Its entries are hints. Only the holder itself knows what it still has, so a wrong entry costs a fetch that fails,
// which is a miss. A key is therefore known by its first 16 bytes (directory_keys.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "proto/shard.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// A daemon of the cluster. The incarnation is random and tells a restart apart: what an earlier one held is not
// believed.
struct Member {
  std::string node;  // unique in the cluster
  uint64_t incarnation = 0;
  std::string control_address, transport_address;  // host:port
  std::string version;                             // of the daemon
  int64_t erased = 0;                              // it has done all erasures up to this revision
  bool operator==(const Member&) const = default;
};

// Every node is to end what it has of a tenant, or of one of its namespaces: also one that comes within
// kErasureLife.
struct ClusterErasure {
  using Id = std::array<uint8_t, 16>;  // random
  Id id{};
  std::string tenant;             // its name
  std::optional<NamespaceId> ns;  // none: all of the tenant's
  std::string node;               // whose operator asked for it
  int64_t revision = 0;           // etcd's, by which erasures have an order
  bool operator==(const ClusterErasure&) const = default;
};
inline constexpr int64_t kErasureLifeSeconds = int64_t{30} * 24 * 3600;
inline constexpr size_t kMostErasures = 1024;  // that are remembered at a time

// The facts by which a node chooses among holders.
struct Holding {
  TierKind tier = TierKind::kDram;  // the highest one that has it
  ObjectKind kind = ObjectKind::kSegment;
  TensorShard shard;        // of at most 256
  uint64_t bytes = 0;       // below 1 TiB
  uint32_t depth = 0;       // tokens in front of the end of a checkpoint or a span
  uint32_t span_begin = 0;  // tokens in front of the beginning of a span; 0 for all other kinds
  // Of the tier hbm: the GPU whose memory has it, by its number in the holder's configuration, below kMostGpus. None:
  // the holder did not say, or there is no GPU.
  std::optional<uint8_t> gpu{};
  static constexpr uint32_t kMostGpus = 255;
  bool operator==(const Holding&) const = default;
};

struct Located {
  size_t index = 0;  // of the key among those asked for
  std::shared_ptr<const Member> member;
  Holding holding;
};

struct DirectoryHealth {
  bool connected = false;    // false: what was known goes on being used, and announcements wait
  storage::Nanos since = 0;  // on the monotonic clock
  std::string reason;        // why it is not connected; or what is wrong though it is
};

struct DirectoryStats {
  uint64_t members = 0;          // present, with this node
  uint64_t entries = 0;          // objects of other nodes that are remembered, also of absent ones until they are swept
  uint64_t bytes = 0;            // of memory for these
  uint64_t entries_refused = 0;  // for which there was no room
  uint64_t entries_unread = 0;   // of an unknown format
  uint64_t queued_announcements = 0, queued_withdrawals = 0;
  uint64_t sent_announcements = 0, sent_withdrawals = 0;
  uint64_t dropped_announcements = 0, dropped_withdrawals = 0;  // the queue was full
  uint64_t watch_events = 0;
  uint64_t resyncs = 0;      // namespaces that were read as a whole
  uint64_t connections = 0;  // that were made, with the first one
  uint64_t swept = 0;        // keys of absent members that this node deleted
  int64_t revision = 0;      // etcd's, as far as this node has seen it
  int64_t revision_lag = 0;  // by which the last event was older than etcd's latest revision
  // When the first certificate of the file for etcd ends, Unix time, as the file was a moment ago; 0: there is none.
  int64_t certificate_expiry = 0;
  int64_t certificate_seconds = 0;  // for how long that one is valid in all
};

// Called on the directory's own thread; they may call the directory, and must not wait. Empty ones are not called.
struct DirectoryEvents {
  std::function<void()> members_changed;
  // etcd lost what this node announced, or never had it: all of it is to be announced again, as there is Room().
  std::function<void()> announce_again;
  // Some came or ended, or what this node said it has done is to be said again (Erased).
  std::function<void()> erasures_changed;
  std::function<void(const DirectoryHealth&)> health_changed;
};

// All methods are thread-safe, and none waits for the network.
class Directory {
 public:
  virtual ~Directory() = default;

  // This node holds an object, or holds it in another tier than it said. Queued: what is worth most (in any unit that
  // compares, say FLOPs saved) is sent first. False: the queue is full of what is worth more, or this was too large to
  // be said.
  virtual bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) = 0;
  // It does not any more. Sent before any announcement. Of what was never announced: harmless.
  virtual void Withdraw(const NamespaceId& ns, const Key& key, const TensorShard& shard) = 0;
  // Announcements that the queue takes now.
  virtual size_t Room() const = 0;
  // An announcement of it was queued, and has made way since for what is worth more: it is to be said again.
  virtual bool GaveUp(const NamespaceId& ns, const Key& key, const TensorShard& shard) const = 0;

  // Only followed namespaces are mirrored. Counted: as many Unfollow end it.
  virtual void Follow(const NamespaceId& ns) = 0;
  virtual void Unfollow(const NamespaceId& ns) = 0;

  // Holders of the keys, in rising order of index, from memory. Never this node, nor an absent member. At most
  // kMaxLocated of a key.
  static constexpr size_t kMaxLocated = 16;
  virtual std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const = 0;
  // Depths of checkpoints that others may hold, of all texts: distinct, the deepest first. At most `most`, none behind
  // `end`, none of 0.
  virtual std::vector<uint64_t> Depths(const NamespaceId& ns, uint64_t end, size_t most) const = 0;
  // The same of the ends of spans that begin at `begin`.
  virtual std::vector<uint64_t> SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const = 0;

  // Tells all nodes, and those that come later. `done` is called once: OK when the directory has it for good.
  // UNAVAILABLE: it cannot be reached, and nobody may have been told. RESOURCE_EXHAUSTED: there are kMostErasures.
  // On any thread.
  virtual void Erase(const ClusterErasure& erasure, std::function<void(const absl::Status&)> done) = 0;
  // Rising by revision; as last known while the directory is away.
  virtual std::vector<ClusterErasure> Erasures() const = 0;
  // This node has done all up to that revision, and says so to the others.
  virtual void Erased(int64_t revision) = 0;
  // A present member has not done an erasure of this namespace: what nodes send of it may be what is to be erased.
  virtual bool BeingErased(const std::string& tenant, const NamespaceId& ns) const = 0;

  // Present members, this node first. While etcd is away: as last known.
  virtual std::vector<std::shared_ptr<const Member>> Members() const = 0;
  virtual DirectoryHealth Health() const = 0;
  virtual DirectoryStats Stats() const = 0;
};

}  // namespace ashlar::daemon
