// SPDX-License-Identifier: Apache-2.0
// An executor whose order of work the simulation decides, and which records how long tenants wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "storage/executor.h"
#include "storage/turns.h"

namespace ashlar::simulation {

// Work begins in turns between tenants, as many pieces at a time as there are threads, and ends in any order.
class SimulatedExecutor final : public storage::Executor {
 public:
  // Without turns (a planted bug), work begins in the order of arrival. The seed draws when work yields
  // although nothing else waits.
  SimulatedExecutor(bool takes_turns, uint64_t seed, const storage::Clock& clock)
      : takes_turns_(takes_turns), random_(seed), clock_(clock) {}

  bool Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(storage::TenantId, std::function<void()> event) override { posted_.push_back(std::move(event)); }
  bool ShouldYield(storage::TenantId tenant) const override {
    const auto own = of_tenant_.find(tenant);
    const bool others = waiting_.size() > (own == of_tenant_.end() ? 0 : own->second);
    return others || random_() % 4 == 0;
  }

  // While it hangs no work ends. With HideHang (a planted bug), this is not reported.
  void Hang(bool hangs);
  bool hangs() const { return hung_since_.has_value(); }
  void HideHang() { hides_hang_ = true; }
  storage::Nanos LongestRun() const override {
    return hangs() && pending() > 0 && !hides_hang_ ? clock_.Now() - *hung_since_ : 0;
  }

  size_t pending() const { return waiting_.size() + running_.size(); }
  // Starts the next pieces on idle threads; then one of the running pieces, chosen by `draw`, does its work and ends.
  void Proceed(uint64_t draw, bool drop_completion);
  void Kill();  // drops all work, as if the process is killed

  void set_capacity(size_t capacity) { capacity_ = capacity; }
  void set_threads(size_t threads) { threads_ = threads; }
  uint64_t refused() const { return refused_; }
  // The most pieces of others that began while a tenant waited here for its next one.
  uint64_t most_passed() const { return most_passed_; }

 private:
  struct Item {
    storage::TenantId tenant = storage::kNoTenant;
    std::function<void()> work, done;
  };

  void Begin();

  const bool takes_turns_;
  mutable std::mt19937_64 random_;
  const storage::Clock& clock_;
  std::optional<storage::Nanos> hung_since_;
  bool hides_hang_ = false;
  size_t capacity_ = 64, threads_ = SIZE_MAX;
  storage::TurnQueue<Item> waiting_{1};
  std::vector<Item> running_;
  std::vector<std::function<void()>> posted_;        // posted by the work that is being done
  std::map<storage::TenantId, uint64_t> of_tenant_;  // waiting pieces
  std::map<storage::TenantId, uint64_t> passed_;     // others' pieces that have begun since its latest one did
  uint64_t refused_ = 0, most_passed_ = 0;
};

}  // namespace ashlar::simulation
