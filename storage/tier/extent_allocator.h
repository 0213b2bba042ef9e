// SPDX-License-Identifier: Apache-2.0
// ExtentAllocator: allocates the extents of one tenant's arenas.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "storage/tier/tier.h"

namespace ashlar::storage {

// Best fit over runs of adjacent free extents; without a long enough run, the longest fragments. All extents have one
// size and an object may use any of them, so fragmentation never loses space. O(log runs) per run taken or freed.
// Deterministic.
class ExtentAllocator {
 public:
  // Adds the free extents [0, extents) of an arena.
  void AddArena(uint32_t arena, uint32_t extents);

  uint64_t free_extents() const { return free_extents_; }

  // `extents` must not exceed free_extents(). Runs are returned in the order in which an object should fill them.
  std::vector<ExtentRun> Take(uint64_t extents);

  // Takes exactly these extents. Returns false without a change if one of them is not free.
  bool TakeRun(const ExtentRun& run);

  // Frees a run and joins it with free neighbours. Aborts if part of it is already free, because an extent with two
  // owners would mix two objects.
  void Give(const ExtentRun& run);

 private:
  using Place = std::pair<uint32_t, uint32_t>;  // arena, first extent

  void Insert(Place place, uint32_t count);
  void Erase(std::map<Place, uint32_t>::iterator run);

  std::map<Place, uint32_t> by_place_;                          // value: extents in the run
  std::set<std::tuple<uint32_t, uint32_t, uint32_t>> by_size_;  // extents, arena, first
  uint64_t free_extents_ = 0;
};

}  // namespace ashlar::storage
