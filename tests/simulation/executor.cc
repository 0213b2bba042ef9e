// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/executor.h"

#include <algorithm>
#include <utility>

namespace ashlar::simulation {

bool SimulatedExecutor::Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) {
  if (pending() >= capacity_) {
    ++refused_;
    return false;
  }
  if (of_tenant_[tenant]++ == 0) passed_[tenant] = 0;
  waiting_.Push(takes_turns_ ? tenant : storage::kNoTenant, {tenant, std::move(work), std::move(done)});
  return true;
}

void SimulatedExecutor::Hang(bool hangs) {
  if (!hangs) {
    hung_since_.reset();
  } else if (!hung_since_) {
    hung_since_ = clock_.Now();
  }
}

void SimulatedExecutor::Begin() {
  auto [queue, item] = *waiting_.Take();
  waiting_.Charge(queue, 1);
  --of_tenant_[item.tenant];
  passed_[item.tenant] = 0;
  for (const auto& [tenant, waiting] : of_tenant_) {
    if (waiting == 0 || tenant == item.tenant) continue;
    most_passed_ = std::max(most_passed_, ++passed_[tenant]);
  }
  running_.push_back(std::move(item));
}

void SimulatedExecutor::Proceed(uint64_t draw, bool drop_completion) {
  while (running_.size() < threads_ && !waiting_.empty()) Begin();
  const auto chosen = running_.begin() + static_cast<ptrdiff_t>(draw % running_.size());
  const Item ended = std::move(*chosen);
  running_.erase(chosen);
  ended.work();
  const std::vector<std::function<void()>> events = std::exchange(posted_, {});
  if (drop_completion) return;
  for (const auto& event : events) event();
  ended.done();
}

void SimulatedExecutor::Kill() {
  while (waiting_.Take()) {
  }
  of_tenant_.clear();
  passed_.clear();
  running_.clear();
}

}  // namespace ashlar::simulation
