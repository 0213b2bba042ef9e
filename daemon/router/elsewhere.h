// SPDX-License-Identifier: Apache-2.0
// PrefillElsewhere: engines on other nodes that offer prefill.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "ashlar/v1/prompt.pb.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/router/prefill_workers.h"
#include "storage/executor.h"

namespace ashlar::daemon {

struct RemoteWorker {
  std::shared_ptr<const Member> member;
  uint64_t worker = 0;  // its number on that node
  double tokens_per_second = 0;
  uint64_t queued_tokens = 0;
  size_t capacity = 0;
  storage::Nanos delay = 0;  // measured latency of replies from that node
};

// Used by the metadata thread only.
class PrefillElsewhere {
 public:
  virtual ~PrefillElsewhere() = default;

  // Asks all nodes that share the tenant. Nodes that do not answer soon are left out.
  virtual void Find(storage::TenantId tenant, const NamespaceId& ns,
                    std::function<void(std::vector<RemoteWorker>)> done) = 0;
  // Lets the worker compute a segment. OK: the other node has it, and a lookup here finds it there until `done`
  // returns, and later only if it is in use. Any other status: it did not arrive within `patience`.
  virtual void Prefill(const RemoteWorker& worker, const PrefillWork& work, storage::Nanos patience,
                       std::function<void(absl::Status)> done) = 0;
  // Asks all nodes that share the tenant how much of a prompt they have. Nodes without an engine of the model, and
  // nodes that do not answer soon, are left out.
  virtual void Probe(storage::TenantId tenant, const NamespaceId& ns, std::shared_ptr<const v1::Prompt> prompt,
                     std::function<void(std::vector<v1::NodeProbe>)> done) = 0;
  // Returns the measured time for `bytes` from that node; 0 if unknown.
  virtual storage::Nanos Estimate(const RemoteWorker& worker, uint64_t bytes) const = 0;
};

}  // namespace ashlar::daemon
