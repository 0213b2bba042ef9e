// SPDX-License-Identifier: Apache-2.0
// Turns: lets tenants take turns by cost, with deficit round robin (Shreedhar and Varghese, 1996).
//
// A thread or queue that serves several tenants one piece at a time (the metadata thread, the workers, copies between
// tiers) asks Turns for the next tenant. Every active tenant gets `quantum` per round, in any unit of cost
// (nanoseconds, bytes), and is served until it has spent it. A piece may cost more than the rest: the tenant then has a
// debt, which the next rounds pay off. So each of n tenants gets 1/n of the service, whatever the others request, and a
// tenant without debt waits at most one quantum and one piece of each other tenant.
//
// Deterministic, not thread-safe.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "storage/ids.h"

namespace ashlar::storage {

// The order of tenants. The owner keeps the work itself.
class Turns {
 public:
  // Must be positive, about the cost of one piece: a smaller quantum takes more rounds to find the next tenant, a
  // larger one makes others wait.
  explicit Turns(int64_t quantum) : quantum_(quantum) { assert(quantum > 0); }

  // The tenant has work: it is queued after those that already wait. No effect if it was active.
  void Activate(TenantId tenant) {
    Share& share = shares_[tenant];
    if (std::exchange(share.active, true)) return;
    ring_.push_back(tenant);
  }
  // The tenant has no work. Its debt stays, and so does a balance of less than a quantum, because its latest piece may
  // not be charged yet: without it, a tenant with one piece at a time would owe for every piece that it paid for.
  void Deactivate(TenantId tenant) {
    const auto found = shares_.find(tenant);
    if (found == shares_.end() || !found->second.active) return;
    std::erase(ring_, tenant);
    found->second.active = false;
    if (found->second.balance == 0) shares_.erase(found);
  }

  // Returns the tenant whose turn it is; the same one until it is charged or deactivated. Empty without an active
  // tenant.
  std::optional<TenantId> Next() {
    if (ring_.empty()) return std::nullopt;
    // A round pays each tenant its quantum. Rounds without a turn are paid at once.
    for (size_t looked_at = 0;; ++looked_at) {
      const TenantId tenant = ring_.front();
      Share& share = shares_.at(tenant);
      if (share.balance > 0) return tenant;
      if (looked_at == ring_.size()) PayDebts();
      share.balance += quantum_;
      if (share.balance > 0) return tenant;
      ring_.pop_front();
      ring_.push_back(tenant);
    }
  }

  // Charges the cost of serving the tenant, known or measured, also for work done without Next. A tenant that has spent
  // its quantum moves to the end.
  void Charge(TenantId tenant, int64_t cost) {
    Share& share = shares_[tenant];
    share.balance -= cost;
    if (!share.active) {
      // Earlier pieces delayed no other tenant, so only this one is charged.
      if (ring_.empty()) share.balance = std::max(share.balance, -cost);
      if (share.balance == 0) shares_.erase(tenant);
    } else if (share.balance <= 0) {
      ring_.erase(std::find(ring_.begin(), ring_.end(), tenant));
      ring_.push_back(tenant);
    }
  }

  size_t active() const { return ring_.size(); }
  const std::deque<TenantId>& waiting() const { return ring_; }  // the front tenant is next

 private:
  struct Share {
    int64_t balance = 0;  // negative: debt
    bool active = false;
  };

  // Pays whole rounds until the tenant with the smallest debt owes less than a quantum.
  void PayDebts() {
    int64_t least = INT64_MAX;
    for (const TenantId tenant : ring_) least = std::min(least, -shares_.at(tenant).balance);
    const int64_t rounds = least / quantum_;
    for (const TenantId tenant : ring_) shares_.at(tenant).balance += rounds * quantum_;
  }

  const int64_t quantum_;
  std::map<TenantId, Share> shares_;  // active tenants, and tenants with a balance
  std::deque<TenantId> ring_;         // active tenants; the front's turn is next
};

// Queued items, in order within each tenant, and in turns between tenants.
template <typename Item>
class TurnQueue {
 public:
  explicit TurnQueue(int64_t quantum) : turns_(quantum) {}

  void Push(TenantId tenant, Item item) {
    items_[tenant].push_back(std::move(item));
    Added(tenant);
  }
  // Inserts before the tenant's other items: the rest of a divided item.
  void PushFront(TenantId tenant, Item item) {
    items_[tenant].push_front(std::move(item));
    Added(tenant);
  }

  // Takes the next item in turn; nothing if none is queued. Charge its tenant when the cost is known.
  std::optional<std::pair<TenantId, Item>> Take() {
    const std::optional<TenantId> tenant = Next();
    if (!tenant.has_value()) return std::nullopt;
    return std::pair<TenantId, Item>(*tenant, Take(*tenant));
  }
  // Takes the first item of a tenant with items, regardless of turns.
  Item Take(TenantId tenant) {
    const auto waiting = items_.find(tenant);
    Item next = std::move(waiting->second.front());
    waiting->second.pop_front();
    if (waiting->second.empty()) {
      items_.erase(waiting);
      turns_.Deactivate(tenant);
    }
    --size_;
    return next;
  }
  // Returns the tenant of the next item in turn; nothing if none is queued.
  std::optional<TenantId> Next() { return turns_.Next(); }
  const std::deque<TenantId>& waiting() const { return turns_.waiting(); }  // tenants, the next one first
  void Charge(TenantId tenant, int64_t cost) { turns_.Charge(tenant, cost); }

  // No item of a paused tenant is next.
  void Pause(TenantId tenant) {
    paused_.insert(tenant);
    turns_.Deactivate(tenant);
  }
  void Resume(TenantId tenant) {
    if (paused_.erase(tenant) > 0 && items_.contains(tenant)) turns_.Activate(tenant);
  }
  void ResumeAll() {
    while (!paused_.empty()) Resume(*paused_.begin());
  }

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  size_t size(TenantId tenant) const {
    const auto waiting = items_.find(tenant);
    return waiting == items_.end() ? 0 : waiting->second.size();
  }

 private:
  void Added(TenantId tenant) {
    ++size_;
    if (!paused_.contains(tenant)) turns_.Activate(tenant);
  }

  Turns turns_;
  std::map<TenantId, std::deque<Item>> items_;  // only tenants with items
  std::set<TenantId> paused_;
  size_t size_ = 0;
};

}  // namespace ashlar::storage
