// SPDX-License-Identifier: Apache-2.0
// PrefillElsewhere: the engines of other nodes that offer prefill.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/router/prefill_workers.h"
#include "storage/executor.h"

namespace ashlar::daemon {

struct RemoteWorker {
  std::shared_ptr<const Member> member;
  uint64_t worker = 0;  // its number there
  double tokens_per_second = 0;
  uint64_t queued_tokens = 0;
  size_t room = 0;
  storage::Nanos delay = 0;  // until an answer of that node is here, as measured
};

// The metadata thread makes all calls and gets all answers.
class PrefillElsewhere {
 public:
  virtual ~PrefillElsewhere() = default;

  // Asks all nodes that share the tenant; who does not answer soon is not among the workers.
  virtual void Find(storage::TenantId tenant, const NamespaceId& ns,
                    std::function<void(std::vector<RemoteWorker>)> done) = 0;
  // Has a segment computed. OK: the other node has it, and until `done` returns a look-up here finds it there; from
  // then on only if it is in use. Any other status: it has not come within `patience`.
  virtual void Prefill(const RemoteWorker& worker, const PrefillWork& work, storage::Nanos patience,
                       std::function<void(absl::Status)> done) = 0;
  // How long so many bytes take from that node, as measured; 0: not known yet.
  virtual storage::Nanos Estimate(const RemoteWorker& worker, uint64_t bytes) const = 0;
};

}  // namespace ashlar::daemon
