// SPDX-License-Identifier: Apache-2.0
// Lifetimes: pins that end, and objects that expire because they were not used.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "storage/executor.h"
#include "storage/objects/entry.h"

namespace ashlar::storage {

class Lifetimes {
 public:
  explicit Lifetimes(const Clock& clock) : clock_(clock) {}

  // The tenant's objects expire if they are unused for `ttl` (0: never). `live`: the existing objects.
  void SetTimeToLive(TenantId tenant, Nanos ttl, std::vector<Entry*> live);
  // The object was looked up or published.
  void Used(Entry& entry);
  // Sets and clears `pinned`; `until` 0: no end. A second pin replaces the first.
  void Pin(Entry& entry, Nanos until);
  void Unpin(Entry& entry);
  // Call it when the object is gone.
  void End(Entry& entry);

  bool IsExpired(const Entry& entry) const;
  // Returns the expired objects, the longest unused last, at most kMostAtOnce of each tenant.
  std::vector<ObjectId> Expired() const;
  // Returns an object whose pin has ended; 0: there is none.
  ObjectId EndedPin() const;

 private:
  static constexpr size_t kMostAtOnce = 4096;

  const Clock& clock_;
  std::map<TenantId, Nanos> ttls_;
  std::map<TenantId, std::list<Entry*>> by_use_;  // tenants' expiring objects, the longest unused first
  std::set<std::pair<Nanos, ObjectId>> pins_;     // pins with an end, by time
};

}  // namespace ashlar::storage
