// SPDX-License-Identifier: Apache-2.0
// Adoption: adds objects that exist elsewhere: on this node's disk since an earlier run, or on another node.
#pragma once

#include <vector>

#include "proto/key.h"
#include "proto/object.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefixes.h"
#include "storage/tier/remote_source.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {

class Adoption {
 public:
  // Both must outlive this object.
  Adoption(ObjectTable& table, Prefixes& prefixes) : table_(table), prefixes_(prefixes) {}

  // Adds the objects that SsdTier::Recover returned, except those published meanwhile. Call before any session, or
  // after a disk was attached. `more`: further calls follow, and nothing can be erased before the last one.
  void Adopt(std::vector<SsdTier::Recovered> objects, bool more = false);
  bool pending() const { return pending_; }  // further calls follow

  // Adds an object that another node holds, so that lookups find it there and load it from Tiers::remote. `cost` is the
  // estimated time (0: unknown). The copy is released when this node has its own copy, or nothing refers to the object.
  // Returns false if the object is already here; the copy is then not taken. The object is kept until SettleRemote,
  // which is called when the lookup has ended, and afterwards while it is in use.
  bool AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost);
  void SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard);
  // Returns whether any shard of the key is published, reserved or adopted here.
  bool Knows(TenantId tenant, const Key& key) const;

 private:
  void AdoptFromDisk(SsdTier::Recovered object);

  ObjectTable& table_;
  Prefixes& prefixes_;
  bool pending_ = false;
};

}  // namespace ashlar::storage
