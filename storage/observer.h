// SPDX-License-Identifier: Apache-2.0
// Observer: is told of every event worth counting.
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

// All calls come on the metadata thread. Bytes are whole objects'.
class Observer {
 public:
  virtual ~Observer() = default;
  // One call for each segment of a look-up; Miss also for a landing (kSegment and 0 tokens if the object is not known).
  virtual void Hit(TenantId /*tenant*/, ObjectKind /*kind*/, TierKind /*tier*/, uint64_t /*tokens*/) {}
  virtual void Miss(TenantId /*tenant*/, ObjectKind /*kind*/, MissReason /*reason*/, uint64_t /*tokens*/) {}
  // An object or a reservation left the cache: no tier holds it any more.
  virtual void Evicted(TenantId /*tenant*/, ObjectKind /*kind*/, const Ghost& /*ghost*/) {}
  virtual void Published(TenantId /*tenant*/, ObjectKind /*kind*/, uint64_t /*bytes*/) {}
  virtual void Landed(TenantId /*tenant*/, uint64_t /*bytes*/) {}
  // A copy in one tier became another in another one: promoted, or demoted.
  virtual void Copied(TenantId /*tenant*/, TierKind /*from*/, TierKind /*to*/, uint64_t /*bytes*/) {}
  // An object that was asked for ahead came up, in time or not.
  virtual void Prefetched(TenantId /*tenant*/, bool /*in_time*/) {}
  // A tier could not read, or not write.
  virtual void TierError(TenantId /*tenant*/, TierKind /*tier*/, const absl::Status& /*error*/) {}
  // The outcome of one object that an engine asked to publish.
  virtual void Reserved(TenantId /*tenant*/, ObjectKind /*kind*/, ReserveOutcome /*outcome*/) {}
  // The tenant's budget has room, but the machine gave no memory (or descriptors, or mappings) for another arena.
  virtual void NoMemory(TenantId /*tenant*/, absl::string_view /*why*/) {}
  // A prompt that may be resumed was looked up.
  virtual void Prompted(TenantId /*tenant*/, uint64_t /*tokens*/) {}
  // A look-up resumes a prompt behind so many tokens: of its conversation's own states, or of its namespace's.
  virtual void Resumed(TenantId /*tenant*/, bool /*own*/, uint64_t /*tokens*/, uint64_t /*prompt*/) {}
  // A look-up's hits stand for so much computing, by the rate that the engine declared.
  virtual void Saved(TenantId /*tenant*/, double /*seconds*/) {}
  // The outcome of one checkpoint of a text that was committed.
  virtual void Committed(TenantId /*tenant*/, CommitOutcome /*outcome*/, bool /*own*/, uint64_t /*depth*/) {}
  // A composition's end; `elapsed` from when it was asked for, 0 where it was refused.
  virtual void Composed(TenantId /*tenant*/, MissReason /*outcome*/, Nanos /*elapsed*/) {}
};

}  // namespace ashlar::storage
