// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prefill_backlog.h"

#include <algorithm>

#include "daemon/router/lpt.h"

namespace ashlar::daemon {

double PrefillBacklog::Remaining(const Queue& queue) const {
  const double seconds = static_cast<double>(clock_.Now() - queue.at) * 1e-9;
  return std::max(0.0, queue.tokens - seconds * queue.rate);
}

void PrefillBacklog::Add(storage::SessionId session, storage::TenantId tenant, const NamespaceId& ns, uint64_t tokens,
                         double tokens_per_second) {
  Queue& queue = queues_[{session, ns}];
  if (queue.rate > 0) queue.tokens = Remaining(queue);
  queue.tokens += static_cast<double>(tokens);
  queue.tenant = tenant;
  queue.rate = tokens_per_second > 0 ? tokens_per_second : kUnknownRate;
  queue.at = clock_.Now();
}

PrefillBacklog::Load PrefillBacklog::Of(storage::TenantId tenant, const NamespaceId& ns) const {
  Load load;
  for (const auto& [of, queue] : queues_) {
    if (of.second != ns || queue.tenant != tenant) continue;
    const auto remaining = static_cast<uint64_t>(std::min(Remaining(queue), 1e15));
    const storage::Nanos wait = ComputeTime(remaining, queue.rate);
    load.wait = load.engines == 0 ? wait : std::min(load.wait, wait);
    load.tokens += remaining;
    ++load.engines;
  }
  return load;
}

void PrefillBacklog::SessionEnded(storage::SessionId session) {
  std::erase_if(queues_, [&](const auto& queue) { return queue.first.first == session; });
}

}  // namespace ashlar::daemon
