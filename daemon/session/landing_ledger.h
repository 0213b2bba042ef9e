// SPDX-License-Identifier: Apache-2.0
// LandingLedger: the landings of one session that must not start any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

namespace ashlar::daemon {

// Quiesce and Land are different calls and may overtake each other. After Quiesce has succeeded, the engine reuses the
// slots, so a Land call that arrives later must write nothing. Landing numbers ascend, so the oldest entries can be
// replaced by a floor below which nothing starts.
class LandingLedger {
 public:
  static constexpr size_t kRemembered = 1024;

  void Silence(uint64_t landing) {
    if (landing < floor_) return;
    silenced_.insert(landing);
    if (silenced_.size() <= kRemembered) return;
    floor_ = *silenced_.begin() + 1;
    silenced_.erase(silenced_.begin());
  }

  bool MayStart(uint64_t landing) const { return landing >= floor_ && !silenced_.contains(landing); }

 private:
  uint64_t floor_ = 0;
  std::set<uint64_t> silenced_;
};

}  // namespace ashlar::daemon
