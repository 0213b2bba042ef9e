// SPDX-License-Identifier: Apache-2.0
// Erasure: permanently removes everything that the cache has of a tenant or of one of its namespaces.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/key.h"
#include "storage/ids.h"
#include "storage/lookup/explainer.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefixes.h"
#include "storage/slice.h"
#include "storage/tier/tiers.h"
#include "storage/upkeep/inventory.h"

namespace ashlar::storage {

// One thread only. Erases what exists when it begins; what is published later stays. Objects are not found after their
// step. An earlier lookup keeps what it found, and leased bytes are freed with their leases. On a disk, records are
// deleted and bytes overwritten. Prompts, conversations, ghosts, texts and misses are erased too. Counters, learned
// prices, and the sketch of key frequencies stay, because they reveal no text.
class Erasure {
 public:
  // The references must outlive it, and it must outlive the SsdTier calls that it has started. `disk` may know a tenant
  // by name that has no budget there or is not configured (kNoTenant). Empty `ns`: the whole tenant.
  Erasure(ObjectTable& table, Prefixes& prefixes, Explainer& explainer, SsdTier* disk, TenantId tenant,
          std::string name, std::optional<NamespaceId> ns);

  // Makes progress; returns true when the objects, including leased ones, are gone and a restart would not find any of
  // them on the disk. Call it again until then.
  bool Run(Slice& slice);

  struct Progress {
    Inventory::Tally erased;
    uint64_t on_disk = 0;      // objects with data left on the disk
    bool found_gone = false;   // lookups find none of it any longer
    bool done = false;         // permanently
    absl::Status overwritten;  // an error: some bytes could not be overwritten and keep their records; retried
  };
  const Progress& progress() const { return progress_; }

 private:
  // Returns whether the disk still has something of an object that is gone.
  bool IsLeavingDisk(ObjectId id) const;
  void Count(const Entry& entry);
  bool EndObjects(Slice& slice);
  bool Overwritten();

  ObjectTable& table_;
  Prefixes& prefixes_;
  Explainer& explainer_;
  SsdTier* const disk_;
  const std::string name_;
  const Selection selection_;
  const ObjectId last_;
  ObjectId after_ = 0;
  bool known_ = true;              // the planners' and histories' knowledge is not erased yet
  std::vector<ObjectId> leaving_;  // objects with data left on the disk
  size_t looked_at_ = 0;           // number checked in this round
  bool asked_ = false;
  std::shared_ptr<std::optional<absl::Status>> erased_;
  Progress progress_;
};

}  // namespace ashlar::storage
