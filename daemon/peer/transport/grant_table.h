// SPDX-License-Identifier: Apache-2.0
// GrantTable: the valid grants of this side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "daemon/peer/transport/grant.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// A grant and all its transfers. Destroying the last reference calls `quiesced`.
struct Allowed {
  Grant grant;
  uint64_t bytes;
  std::shared_ptr<GrantedBytes> granted;
  std::function<void()> quiesced;
  std::set<uint64_t> transfers;
  ~Allowed() {
    if (quiesced) quiesced();
  }
};

// Thread-safe, because a peer may use a grant before the transport's thread sees it.
class GrantTable {
 public:
  void Add(const Grant& grant, uint64_t bytes, std::shared_ptr<GrantedBytes> granted);
  std::shared_ptr<Allowed> Find(uint64_t number) const;  // null without one
  std::shared_ptr<Allowed> Remove(uint64_t number);      // likewise
  void Clear();
  size_t size() const;

 private:
  mutable Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Allowed>> grants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
