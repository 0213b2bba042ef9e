// SPDX-License-Identifier: Apache-2.0
// Offers: drains, and transfers of objects between nodes that no engine waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/policy/eviction.h"

namespace ashlar::storage {

// All shards of a key's bundle, with their history: the receiving node has none.
struct Offering {
  TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  uint32_t shards = 1;
  uint64_t bytes = 0;      // size of the largest shard
  uint32_t uses = 0;       // lookups that found it
  uint64_t idle = 0;       // requests of its tenant since its last use
  float saves_a_byte = 0;  // FLOPs per byte
  uint64_t group =
      0;  // number shared by objects that are used together: those of one text (PrefixKeys::Group); 0: none
};

// Metadata thread only.
class Offers {
 public:
  virtual ~Offers() = default;

  // Draining, before the memory tiers are lost. Lookups miss everything (kDaemonUnavailable), nothing is reserved
  // (kUnavailable), and calls in flight continue. Objects in memory only are written to the disk while it has free
  // space, regardless of the admission policy: pinned ones first, then those with most hits (CopyScheduler::Flush).
  // StartDrain may be called again, for the remaining objects. EndDrain accepts requests again.
  virtual void StartDrain() = 0;
  virtual void EndDrain() = 0;
  virtual bool draining() const = 0;

  // During a drain, other nodes may take objects whose write to the disk has not begun. NextForTransfer returns an
  // object that is only in memory: pinned ones first, then by value; nothing if none is left now. The disk does not
  // write it until TransferEnded reports whether another node has accepted it; it then counts as saved.
  virtual std::optional<Offering> NextForTransfer() = 0;
  virtual void TransferEnded(TenantId tenant, const Key& key, bool accepted) = 0;

  // Sets the group of all shards of an object.
  virtual void SetGroup(TenantId tenant, const Key& key, uint64_t group) = 0;
  // Returns the description of an object whose shards are all here; nothing for any other.
  virtual std::optional<Offering> Describe(TenantId tenant, const Key& key) const = 0;
  // Judges another node's offer: kAccepted if this node accepts it. `evicting`: also in place of less valuable objects.
  virtual TakeOutcome Judge(const Offering& offered, bool evicting) = 0;
  // Promotes an offered object with adopted shards (Adoption::AdoptRemote). ReportArrivals calls `done`; Promote calls
  // it itself if the object cannot come.
  virtual void Promote(const Offering& offered, std::function<void(bool whole)> done) = 0;
  // Reports arrived and failed objects. Call it many times a second.
  virtual void ReportArrivals() = 0;
};

}  // namespace ashlar::storage
