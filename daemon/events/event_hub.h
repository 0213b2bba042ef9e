// SPDX-License-Identifier: Apache-2.0
// EventHub: tells subscribers what the cache of this node stores, moves and removes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/objects/object_table.h"

namespace ashlar::daemon {

// One object's change on this node. kGap: `lost` events that the subscriber took too late to hear of; nothing else is
// set but the sequence.
struct CacheEvent {
  enum class Kind : uint8_t { kStored = 1, kRemoved = 2, kTier = 3, kGap = 4 };
  Kind kind = Kind::kStored;
  uint64_t sequence = 0;  // of this hub's events; of a gap: of the last one that is lost
  storage::TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind object = ObjectKind::kSegment;
  TensorShard shard;
  TierKind tier = TierKind::kNone;  // the nearest copy's; kRemoved: where the last one was
  TierKind was = TierKind::kNone;   // kTier: before
  uint64_t tokens = 0, bytes = 0;
  uint64_t lost = 0;
};

// Nobody waits for a subscriber: each has a bounded queue, and one that is too slow hears of a gap in place of what did
// not fit.
class EventHub {
 public:
  struct Filter {
    std::optional<storage::TenantId> tenant;
    std::optional<NamespaceId> ns;
  };
  class Subscription {
   public:
    // Returns the events in order, at most `most`, as soon as there are any; none after `patience`.
    std::vector<CacheEvent> Take(size_t most, storage::Nanos patience);

   private:
    friend class EventHub;
    void Add(const CacheEvent& event);

    Filter filter_;
    size_t capacity_ = 0;
    std::function<void()> wake_;  // may be empty
    std::mutex mutex_;
    std::condition_variable some_;
    std::deque<CacheEvent> events_;  // guarded by mutex_, as below
    uint64_t lost_ = 0;              // of those behind the queue
    uint64_t last_lost_ = 0;
  };

  // Events that wait for one subscriber, and subscribers.
  static constexpr size_t kMostWaiting = 65536, kMostSubscribers = 16;

  // Ends with the last holder of what is returned. Null: there are too many. Any thread, as Take. `wake` is called when
  // there is something to take after there was nothing, on the metadata thread: it may not block. It may be called
  // once more while the subscription ends, so it owns what it uses.
  std::shared_ptr<Subscription> Subscribe(const Filter& filter, size_t capacity = kMostWaiting,
                                          std::function<void()> wake = {});
  size_t subscribers() const;

  // What ObjectTableOptions::residence is told. The metadata thread.
  void Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);
  uint64_t told() const { return told_; }  // events, ever; the metadata thread

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Subscription>> subscriptions_;  // guarded by mutex_
  uint64_t told_ = 0;
};

}  // namespace ashlar::daemon
