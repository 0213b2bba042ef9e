// SPDX-License-Identifier: Apache-2.0
// Observer: receives all events worth counting.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/history/ghost_table.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// All calls come on the metadata thread. Bytes are those of whole objects.
class Observer {
 public:
  virtual ~Observer() = default;
  // Called once per segment of a lookup. Miss is also called for landings (kSegment and 0 tokens if the object is
  // unknown).
  virtual void Hit(TenantId /*tenant*/, ObjectKind /*kind*/, TierKind /*tier*/, uint64_t /*tokens*/) {}
  virtual void Miss(TenantId /*tenant*/, ObjectKind /*kind*/, MissReason /*reason*/, uint64_t /*tokens*/) {}
  // An object or reservation left the cache; no tier holds it any more.
  virtual void Evicted(TenantId /*tenant*/, ObjectKind /*kind*/, const Ghost& /*ghost*/) {}
  virtual void Published(TenantId /*tenant*/, ObjectKind /*kind*/, uint64_t /*bytes*/) {}
  virtual void Landed(TenantId /*tenant*/, uint64_t /*bytes*/) {}
  // A copy was promoted or demoted from one tier to another.
  virtual void Copied(TenantId /*tenant*/, TierKind /*from*/, TierKind /*to*/, uint64_t /*bytes*/) {}
  // A prefetched object was loaded, in time or not.
  virtual void Prefetched(TenantId /*tenant*/, bool /*in_time*/) {}
  // A read or write of a tier failed.
  virtual void TierError(TenantId /*tenant*/, TierKind /*tier*/, const absl::Status& /*error*/) {}
  // The outcome of an object that an engine wanted to publish.
  virtual void Reserved(TenantId /*tenant*/, ObjectKind /*kind*/, ReserveOutcome /*outcome*/) {}
  // The tenant's budget has space, but the machine has no memory, descriptors or mappings for another arena.
  virtual void NoMemory(TenantId /*tenant*/, absl::string_view /*why*/) {}
  // A prompt that may be resumed was looked up.
  virtual void Prompted(TenantId /*tenant*/, uint64_t /*tokens*/) {}
  // A lookup resumes a prompt after `tokens`, from states of its conversation or of its namespace.
  virtual void Resumed(TenantId /*tenant*/, bool /*own*/, uint64_t /*tokens*/, uint64_t /*prompt*/) {}
  // Compute time that a lookup's hits saved, at the engine's declared rate.
  virtual void Saved(TenantId /*tenant*/, double /*seconds*/) {}
  // The outcome of one checkpoint of a committed text.
  virtual void Committed(TenantId /*tenant*/, CommitOutcome /*outcome*/, bool /*own*/, uint64_t /*depth*/) {}
  // A composition ended. `elapsed` counts from the request; 0 if it was refused.
  virtual void Composed(TenantId /*tenant*/, MissReason /*outcome*/, Nanos /*elapsed*/) {}
};

}  // namespace ashlar::storage
