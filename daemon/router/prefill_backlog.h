// SPDX-License-Identifier: Apache-2.0
// PrefillBacklog: the tokens that engines of this node have to compute for the prompts that they have looked up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "proto/key.h"
#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// An estimate: each engine has a queue of the tokens that its lookups have missed, and computes them one after the
// other at its declared rate. Engines report no progress. Decoding is not included, nor requests that an engine holds
// back before their lookup. The metadata thread only.
class PrefillBacklog {
 public:
  explicit PrefillBacklog(const storage::Clock& clock) : clock_(clock) {}

  // An engine will compute `tokens`. `tokens_per_second` 0: unknown.
  void Add(storage::SessionId session, storage::TenantId tenant, const NamespaceId& ns, uint64_t tokens,
           double tokens_per_second);
  struct Load {
    uint64_t tokens = 0;      // sum over all engines
    storage::Nanos wait = 0;  // wait of the engine that is free first
    size_t engines = 0;       // engines that have looked prompts up
  };
  Load Of(storage::TenantId tenant, const NamespaceId& ns) const;
  void SessionEnded(storage::SessionId session);

 private:
  struct Queue {
    storage::TenantId tenant = 0;
    double tokens = 0;  // at `at`
    double rate = 0;    // positive
    storage::Nanos at = 0;
  };
  double Remaining(const Queue& queue) const;

  const storage::Clock& clock_;
  std::map<std::pair<storage::SessionId, NamespaceId>, Queue> queues_;  // a session opens few models
};

}  // namespace ashlar::daemon
