// SPDX-License-Identifier: Apache-2.0
// Directory: records which objects the other nodes of the cluster hold. A single node has a LocalDirectory; each node
// of a cluster has an EtcdDirectory.
//
// Entries are hints. Only the holder knows what it has, so a wrong entry costs a failed fetch, which is a miss. That is
// why a key is stored by its first 16 bytes only (directory_keys.h).
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

// A daemon of the cluster. The incarnation is random, so that a restart is noticed: entries of an earlier incarnation
// are ignored.
struct Member {
  std::string node;  // unique in the cluster
  uint64_t incarnation = 0;
  std::string control_address, transport_address;  // host:port
  std::string version;                             // version of the daemon
  int64_t erased = 0;                              // all erasures up to this revision are done
  bool operator==(const Member&) const = default;
};

// Every node must erase a tenant, or one of its namespaces; also nodes that join within kErasureLife.
struct ClusterErasure {
  using Id = std::array<uint8_t, 16>;  // random
  Id id{};
  std::string tenant;             // tenant name
  std::optional<NamespaceId> ns;  // empty: all namespaces of the tenant
  std::string node;               // node whose operator requested it
  int64_t revision = 0;           // etcd revision, which orders erasures
  bool operator==(const ClusterErasure&) const = default;
};
inline constexpr int64_t kErasureLifeSeconds = int64_t{30} * 24 * 3600;
inline constexpr size_t kMostErasures = 1024;  // erasures kept at a time

// What a node uses to choose among holders.
struct Holding {
  TierKind tier = TierKind::kDram;  // fastest tier with the object
  ObjectKind kind = ObjectKind::kSegment;
  TensorShard shard;        // one of at most 256 shards
  uint64_t bytes = 0;       // less than 1 TiB
  uint32_t depth = 0;       // tokens before the end of a checkpoint or span
  uint32_t span_begin = 0;  // tokens before the start of a span; 0 for other kinds
  // For the tier hbm: the number of the GPU in the holder's configuration, less than kMostGpus. Empty if unknown or
  // without a GPU.
  std::optional<uint8_t> gpu{};
  static constexpr uint32_t kMostGpus = 255;
  bool operator==(const Holding&) const = default;
};

struct Located {
  size_t index = 0;  // index of the requested key
  std::shared_ptr<const Member> member;
  Holding holding;
};

struct DirectoryHealth {
  bool connected = false;    // if false, known entries stay in use and announcements wait
  storage::Nanos since = 0;  // monotonic clock
  std::string reason;        // why it is not connected, or a problem while connected
};

struct DirectoryStats {
  uint64_t members = 0;  // present members, including this node
  uint64_t entries = 0;  // remembered objects of other nodes, including those of absent nodes until they are swept
  uint64_t bytes = 0;    // memory of the entries
  uint64_t entries_refused = 0;  // refused for lack of space
  uint64_t entries_unread = 0;   // entries in an unknown format
  uint64_t queued_announcements = 0, queued_withdrawals = 0;
  uint64_t sent_announcements = 0, sent_withdrawals = 0;
  uint64_t dropped_announcements = 0, dropped_withdrawals = 0;  // dropped because the queue was full
  uint64_t watch_events = 0;
  uint64_t resyncs = 0;      // namespaces that were read as a whole
  uint64_t connections = 0;  // connections made so far
  uint64_t swept = 0;        // keys of absent members that this node deleted
  int64_t revision = 0;      // latest etcd revision that this node has seen
  int64_t revision_lag = 0;  // how far the last event lagged behind etcd's latest revision
  // Expiry of the first certificate of the client certificate file for etcd, Unix time, as last read; 0 without one.
  int64_t certificate_expiry = 0;
  int64_t certificate_seconds = 0;  // lifetime of that certificate
};

// Called on the directory's own thread. They may call the directory, and must not block. Empty ones are skipped.
struct DirectoryEvents {
  std::function<void()> members_changed;
  // etcd lost this node's announcements, or never had them: announce all objects again, as RemainingCapacity() permits.
  std::function<void()> announce_again;
  // Erasures were added or removed, or this node must report its progress again (Erased).
  std::function<void()> erasures_changed;
  std::function<void(const DirectoryHealth&)> health_changed;
};

// All methods are thread-safe and do not wait for the network.
class Directory {
 public:
  virtual ~Directory() = default;

  // This node holds an object, or its tier changed. Announcements are queued; those with the highest worth (in any
  // comparable unit, such as saved FLOPs) are sent first. Returns false if the queue is full of more valuable ones, or
  // if the entry is too large.
  virtual bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) = 0;
  // This node no longer holds the object. Withdrawals are sent before announcements. Withdrawing an unannounced object
  // has no effect.
  virtual void Withdraw(const NamespaceId& ns, const Key& key, const TensorShard& shard) = 0;
  // Number of announcements that the queue accepts now.
  virtual size_t RemainingCapacity() const = 0;
  // Returns whether a queued announcement of the object was displaced by a more valuable one. Announce it again.
  virtual bool WasDisplaced(const NamespaceId& ns, const Key& key, const TensorShard& shard) const = 0;

  // Only followed namespaces are mirrored. Calls are counted: one Unfollow per Follow.
  virtual void Follow(const NamespaceId& ns) = 0;
  virtual void Unfollow(const NamespaceId& ns) = 0;

  // Returns the holders of the keys from memory, in ascending order of index. Excludes this node and absent members. At
  // most kMaxLocated per key.
  static constexpr size_t kMaxLocated = 16;
  virtual std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const = 0;
  // Returns the depths of checkpoints of all texts that other nodes may hold: distinct, deepest first, at most `most`,
  // greater than 0 and at most `end`.
  virtual std::vector<uint64_t> Depths(const NamespaceId& ns, uint64_t end, size_t most) const = 0;
  // Returns the ends of spans that begin at `begin`, in the same way.
  virtual std::vector<uint64_t> SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const = 0;

  // Records the erasure for all nodes, present and future. `done` is called once, on any thread. OK: the directory has
  // stored it. UNAVAILABLE: the directory is not reachable, and no node may have been told. RESOURCE_EXHAUSTED: there
  // are kMostErasures.
  virtual void Erase(const ClusterErasure& erasure, std::function<void(const absl::Status&)> done) = 0;
  // Ascending by revision. The last known state while the directory is not reachable.
  virtual std::vector<ClusterErasure> Erasures() const = 0;
  // Records that this node has done all erasures up to `revision`.
  virtual void Erased(int64_t revision) = 0;
  // Returns whether a present member has not done an erasure of this namespace yet, so that objects it sends may be
  // ones to erase.
  virtual bool BeingErased(const std::string& tenant, const NamespaceId& ns) const = 0;

  // Present members, this node first. The last known state while etcd is not reachable.
  virtual std::vector<std::shared_ptr<const Member>> Members() const = 0;
  virtual DirectoryHealth Health() const = 0;
  virtual DirectoryStats Stats() const = 0;
};

}  // namespace ashlar::daemon
