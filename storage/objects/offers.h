// SPDX-License-Identifier: Apache-2.0
// Offers: objects that pass between nodes without an engine that waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/policy/eviction.h"

namespace ashlar::storage {

// All shards of a key's bundle. What its worth is made of comes along: the node that takes it has no record of it.
struct Offering {
  TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  uint32_t shards = 1;
  uint64_t bytes = 0;      // of the largest shard
  uint32_t uses = 0;       // that have found it
  uint64_t idle = 0;       // since the last one, in requests of its tenant
  float saves_a_byte = 0;  // FLOPs
  uint64_t group = 0;      // of objects that are of use together: a text's (PrefixKeys::Group); 0: none
};

// The metadata thread only.
class Offers {
 public:
  virtual ~Offers() = default;

  // In a drain other nodes may take what the disk has not begun to write. NextToHand returns an object of those that
  // memory has alone: what is pinned first, then what is hottest. The disk leaves it alone until Handed says whether
  // another node has it now; then it counts as saved, and is not written. Empty: there is none left at present.
  virtual std::optional<Offering> NextToHand() = 0;
  virtual void Handed(TenantId tenant, const Key& key, bool taken) = 0;

  // Says to which group all shards of an object belong.
  virtual void SetGroup(TenantId tenant, const Key& key, uint64_t group) = 0;
  // Describes an object that is here as a whole; empty for any other.
  virtual std::optional<Offering> Describe(TenantId tenant, const Key& key) const = 0;
  // Judges what another node offers: kTaken where it may come. `evicting`: in place of what is worth less.
  virtual TakeOutcome Judge(const Offering& offered, bool evicting) = 0;
  // Brings up an offered object whose shards were adopted (Cache::AdoptRemote). `done` comes from SettleTaken, or at
  // once where it cannot come.
  virtual void Promote(const Offering& offered, std::function<void(bool whole)> done) = 0;
  // Answers for what has come, or has failed to. Call it many times a second.
  virtual void SettleTaken() = 0;
};

}  // namespace ashlar::storage
