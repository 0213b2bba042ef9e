// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/extent_allocator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

namespace ashlar::storage {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "extent allocator: %s\n", what);
  std::abort();
}

}  // namespace

void ExtentAllocator::AddArena(uint32_t arena, uint32_t extents) {
  Require(extents > 0, "an arena must have extents");
  Insert({arena, 0}, extents);
  free_extents_ += extents;
}

std::vector<ExtentRun> ExtentAllocator::Take(uint64_t extents) {
  Require(extents <= free_extents_, "more extents taken than free");
  std::vector<ExtentRun> taken;
  uint64_t missing = extents;
  while (missing > 0) {
    // Returns the smallest run that holds all missing extents, or else the longest run.
    const auto wanted = static_cast<uint32_t>(std::min<uint64_t>(missing, UINT32_MAX));
    auto best = by_size_.lower_bound({wanted, 0, 0});
    if (best == by_size_.end()) best = std::prev(best);
    const auto [count, arena, first] = *best;
    const uint32_t use = std::min(count, wanted);
    Erase(by_place_.find({arena, first}));
    if (use < count) Insert({arena, first + use}, count - use);
    taken.push_back({arena, first, use});
    missing -= use;
  }
  free_extents_ -= extents;
  return taken;
}

bool ExtentAllocator::TakeRun(const ExtentRun& run) {
  const auto behind = by_place_.upper_bound({run.arena, run.first});
  if (behind == by_place_.begin()) return false;
  const auto holder = std::prev(behind);
  const auto [place, count] = *holder;
  const uint64_t end = uint64_t{run.first} + run.count;
  const uint64_t holder_end = uint64_t{place.second} + count;
  if (place.first != run.arena || end > holder_end) return false;
  Erase(holder);
  if (place.second < run.first) Insert(place, run.first - place.second);
  if (end < holder_end) Insert({run.arena, static_cast<uint32_t>(end)}, static_cast<uint32_t>(holder_end - end));
  free_extents_ -= run.count;
  return true;
}

void ExtentAllocator::Give(const ExtentRun& run) {
  Place place{run.arena, run.first};
  uint32_t count = run.count;
  auto next = by_place_.lower_bound(place);
  if (next != by_place_.begin()) {
    const auto previous = std::prev(next);
    const auto [previous_place, previous_count] = *previous;
    if (previous_place.first == run.arena) {
      const uint32_t previous_end = previous_place.second + previous_count;
      Require(previous_end <= run.first, "extent freed twice");
      if (previous_end == run.first) {
        place = previous_place;
        count += previous_count;
        Erase(previous);
      }
    }
  }
  if (next != by_place_.end() && next->first.first == run.arena) {
    Require(run.first + run.count <= next->first.second, "extent freed twice");
    if (run.first + run.count == next->first.second) {
      count += next->second;
      Erase(next);
    }
  }
  Insert(place, count);
  free_extents_ += run.count;
}

void ExtentAllocator::Insert(Place place, uint32_t count) {
  by_place_.emplace(place, count);
  by_size_.emplace(count, place.first, place.second);
}

void ExtentAllocator::Erase(std::map<Place, uint32_t>::iterator run) {
  by_size_.erase({run->second, run->first.first, run->first.second});
  by_place_.erase(run);
}

}  // namespace ashlar::storage
