// SPDX-License-Identifier: Apache-2.0
// Erasure: all that the cache has, and knows, of a tenant or of one of its namespaces goes, and does not come back.
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

// One thread. Takes what is there when it begins; what is published later stays.
// Objects are found by nobody from their step on. A look-up that began before may keep what it found, and leased bytes
// leave with their leases. On a disk the records are deleted and the bytes overwritten. Prompts, conversations, ghosts,
// texts and misses go with them. Counters, learned prices, and the sketch of how often keys were used stay: no text can
// be told from these.
class Erasure {
 public:
  // The references must outlive it, and it the calls of SsdTier that it has begun. By its name `disk` may know a tenant
  // that has no budget there, or that nobody configures (kNoTenant). `ns` none: all of the tenant's.
  Erasure(ObjectTable& table, Prefixes& prefixes, Explainer& explainer, SsdTier* disk, TenantId tenant,
          std::string name, std::optional<NamespaceId> ns);

  // Goes on; true once all is done: the objects have ended, and of those that had something on the disk nothing is
  // there that a restart would find. Of leased objects that is so, too. Call it again until then.
  bool Run(Slice& slice);

  struct Progress {
    Inventory::Tally erased;
    uint64_t on_disk = 0;      // objects of which something is still there
    bool found_gone = false;   // look-ups find nothing of it any more
    bool done = false;         // for good
    absl::Status overwritten;  // an error: some bytes could not be overwritten, and have their records; tried again
  };
  const Progress& progress() const { return progress_; }

 private:
  void Tell(const Entry& entry);
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
  bool known_ = true;              // what knows of them is still there
  std::vector<ObjectId> leaving_;  // of which something is on the disk
  size_t looked_at_ = 0;           // of these, in this round
  bool asked_ = false;
  std::shared_ptr<std::optional<absl::Status>> erased_;
  Progress progress_;
};

}  // namespace ashlar::storage
