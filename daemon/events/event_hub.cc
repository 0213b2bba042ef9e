// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/event_hub.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ashlar::daemon {

std::vector<CacheEvent> EventHub::Subscription::Take(size_t most, storage::Nanos patience) {
  MutexLock lock(mutex_);
  const auto deadline = CondVar::Clock::now() + std::chrono::nanoseconds(patience);
  while (events_.empty() && lost_ == 0 && some_.WaitUntil(mutex_, deadline)) continue;
  std::vector<CacheEvent> taken;
  for (; taken.size() < most && !events_.empty(); events_.pop_front()) taken.push_back(events_.front());
  if (events_.empty() && lost_ > 0 && taken.size() < most) {
    taken.push_back({.kind = CacheEvent::Kind::kGap, .sequence = last_lost_, .lost = lost_});
    lost_ = 0;
  }
  return taken;
}

// Events that follow an unreported gap belong to it, which keeps the order.
void EventHub::Subscription::Add(const CacheEvent& event) {
  if (filter_.tenant.has_value() && *filter_.tenant != event.pool.tenant) return;
  if (filter_.ns.has_value() && *filter_.ns != event.ns) return;
  bool first = false;
  {
    MutexLock lock(mutex_);
    first = events_.empty() && lost_ == 0;
    if (lost_ > 0 || events_.size() >= capacity_) {
      ++lost_;
      last_lost_ = event.sequence;
    } else {
      events_.push_back(event);
    }
  }
  some_.NotifyOne();
  if (first && wake_) wake_();
}

std::shared_ptr<EventHub::Subscription> EventHub::Subscribe(const Filter& filter, size_t capacity,
                                                            std::function<void()> wake) {
  auto subscription = std::make_shared<Subscription>();
  subscription->filter_ = filter;
  subscription->capacity_ = capacity;
  subscription->wake_ = std::move(wake);
  MutexLock lock(mutex_);
  std::erase_if(subscriptions_, [](const auto& one) { return one.expired(); });
  if (subscriptions_.size() >= kMostSubscribers) return nullptr;
  subscriptions_.push_back(subscription);
  return subscription;
}

size_t EventHub::subscribers() const {
  MutexLock lock(mutex_);
  return static_cast<size_t>(std::ranges::count_if(subscriptions_, [](const auto& one) { return !one.expired(); }));
}

void EventHub::Resides(const storage::TenantPool& pool, const ObjectHeader& header,
                       const storage::Residence& residence) {
  const TierKind was = residence.was, now = residence.nearest;
  if (was == now) return;
  const bool removed = now == TierKind::kNone;
  CacheEvent event{.kind = removed                  ? CacheEvent::Kind::kRemoved
                           : was == TierKind::kNone ? CacheEvent::Kind::kStored
                                                    : CacheEvent::Kind::kTier,
                   .sequence = ++published_,
                   .pool = pool,
                   .ns = header.ns,
                   .key = header.key,
                   .object = header.kind,
                   .shard = header.shard,
                   .tier = removed ? was : now,
                   .was = was,
                   // A block's header counts tokens from the start of the text.
                   .tokens = header.tokens - (header.kind == ObjectKind::kPrefixBlock ? header.first_token : 0),
                   .bytes = header.bytes};
  MutexLock lock(mutex_);
  for (const std::weak_ptr<Subscription>& one : subscriptions_) {
    if (const std::shared_ptr<Subscription> subscription = one.lock()) subscription->Add(event);
  }
}

}  // namespace ashlar::daemon
