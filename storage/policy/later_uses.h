// SPDX-License-Identifier: Apache-2.0
// LaterUses: learns how many of the objects that memory evicts are used later.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "storage/policy/reuse_model.h"

namespace ashlar::storage {

// The objects of one tenant. Time is counted in extents that were considered for eviction: a disk of n extents keeps an
// object for about n of them. A spell begins when an object is considered for eviction, and ends with the next lookup
// that uses the object, or would use it if it were cached, so the model also learns from evicted objects. A spell that
// has not ended counts up to its age (ReuseModel). If there are too many spells, only a sample of the keys is followed.
class LaterUses {
 public:
  // `uses`: earlier uses of the object, and of the text that it continues.
  using Subject = ReuseModel::Subject;

  // The object is considered for eviction. Returns the probability that it is used before `horizon` more extents are
  // considered.
  double Evicted(const Key& key, const Subject& subject, uint64_t extents, uint64_t horizon);
  // A lookup uses the object, or would use it if it were cached.
  void Used(const Key& key);
  // Erases the keys; what was learned stays.
  void Erase();

 private:
  // Names are parts of keys, which are hashes.
  struct Begun {
    uint64_t name = 0, at = 0;
  };
  struct Spell {
    uint64_t began = 0;
    Subject subject;
  };

  static uint64_t NameOf(const Key& key);
  bool IsFollowed(uint64_t name) const { return name % stride_ == 0; }
  void Follow(uint64_t name, const Subject& subject);
  void End(uint64_t name, bool used);
  void Refresh();

  ReuseModel model_;
  uint64_t now_ = 0;
  uint64_t stride_ = 1;                          // one key in `stride_` is followed
  std::deque<Begun> begun_;                      // oldest first; includes spells that have ended
  absl::flat_hash_map<uint64_t, Spell> spells_;  // keyed by name; contains those that have not ended
  std::array<double, 2 * kReuseKinds> came_{};   // spells begun, by kind and whether there were uses
  size_t events_ = 0;                            // spells begun or ended since the last refresh
};

}  // namespace ashlar::storage
