// SPDX-License-Identifier: Apache-2.0
// EventHub: publishes to subscribers what the cache of this node stores, moves and removes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/objects/object_table.h"

namespace ashlar::daemon {

// A change of one object on this node. kGap stands for `lost` events that the subscriber was too slow to take; only its
// sequence is set.
struct CacheEvent {
  enum class Kind : uint8_t { kStored = 1, kRemoved = 2, kTier = 3, kGap = 4 };
  Kind kind = Kind::kStored;
  uint64_t sequence = 0;  // number of the event in this hub; for a gap, the number of the last lost event
  storage::TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind object = ObjectKind::kSegment;
  TensorShard shard;
  TierKind tier = TierKind::kNone;  // fastest tier with a copy; for kRemoved, the last tier with one
  TierKind was = TierKind::kNone;   // kTier only: the previous tier
  uint64_t tokens = 0, bytes = 0;
  uint64_t lost = 0;
};

// Publishing never waits for a subscriber. Each subscriber has a bounded queue. If the queue overflows, the subscriber
// gets a gap in place of the lost events.
class EventHub {
 public:
  struct Filter {
    std::optional<storage::TenantId> tenant;
    std::optional<NamespaceId> ns;
  };
  class Subscription {
   public:
    // Returns at most `most` events in order, as soon as there are any; none if `patience` passes first.
    std::vector<CacheEvent> Take(size_t most, storage::Nanos patience);

   private:
    friend class EventHub;
    void Add(const CacheEvent& event);

    Filter filter_;
    size_t capacity_ = 0;
    std::function<void()> wake_;  // may be empty
    Mutex mutex_;
    CondVar some_;
    std::deque<CacheEvent> events_ ABSL_GUARDED_BY(mutex_);
    uint64_t lost_ ABSL_GUARDED_BY(mutex_) = 0;  // events lost after the last queued one
    uint64_t last_lost_ ABSL_GUARDED_BY(mutex_) = 0;
  };

  // Most queued events per subscriber, and most subscribers.
  static constexpr size_t kMostWaiting = 65536, kMostSubscribers = 16;

  // The subscription ends when the last reference is dropped. Returns null if there are too many subscribers. Any
  // thread, like Take. `wake` is called on the metadata thread when the queue becomes non-empty, and must not block.
  // `wake` may be called once more while the subscription ends, so it must own what it uses.
  std::shared_ptr<Subscription> Subscribe(const Filter& filter, size_t capacity = kMostWaiting,
                                          std::function<void()> wake = {});
  size_t subscribers() const;

  // Implements ObjectTableOptions::residence. The metadata thread only.
  void Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);
  uint64_t published() const { return published_; }  // number of events published so far; the metadata thread only

 private:
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<Subscription>> subscriptions_ ABSL_GUARDED_BY(mutex_);
  uint64_t published_ = 0;
};

}  // namespace ashlar::daemon
