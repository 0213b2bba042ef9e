// SPDX-License-Identifier: Apache-2.0
// ExtentAllocator: the free extents of one tenant's arenas.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "storage/tier/tier.h"

namespace ashlar::storage {

// Best fit over runs of adjacent free extents; where no run is long enough, the longest fragments. Extents are of one
// size and an object may lie in any of them, so nothing is ever lost to fragmentation. O(log runs) for every run taken
// or given back; the same calls give the same answers.
class ExtentAllocator {
 public:
  // The arena's extents [0, extents) become free.
  void AddArena(uint32_t arena, uint32_t extents);

  uint64_t free_extents() const { return free_extents_; }

  // `extents` must not exceed free_extents(). Runs come in the order in which an object should fill them.
  std::vector<ExtentRun> Take(uint64_t extents);

  // Takes just these extents. False, and nothing is taken, where one of them is not free.
  bool TakeRun(const ExtentRun& run);

  // Gives a run back, joined with its free neighbours. Aborts if any of it is free already: two owners of one extent
  // would be two objects in the same bytes.
  void Give(const ExtentRun& run);

 private:
  using Place = std::pair<uint32_t, uint32_t>;  // arena, first extent

  void Insert(Place place, uint32_t count);
  void Erase(std::map<Place, uint32_t>::iterator run);

  std::map<Place, uint32_t> by_place_;                          // → extents in the run
  std::set<std::tuple<uint32_t, uint32_t, uint32_t>> by_size_;  // extents, arena, first
  uint64_t free_extents_ = 0;
};

}  // namespace ashlar::storage
