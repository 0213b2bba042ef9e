// SPDX-License-Identifier: Apache-2.0
#include "client/engine/staging.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace ashlar::engine {
namespace {

constexpr uint64_t kLeast = uint64_t{1} << 16;

}  // namespace

Staging::Held::~Held() {
  if (staging_ == nullptr) return;
  MutexLock lock(staging_->mutex_);
  std::vector<Region>& free = staging_->free_;
  free.push_back(std::move(region_));
  // The smallest region is dropped: others can do its work.
  if (free.size() > kKept) free.erase(std::ranges::min_element(free, {}, &Region::size));
}

std::byte* Staging::Held::Take(uint64_t bytes) {
  std::byte* const taken = region_.data() + used_;
  used_ += Align(bytes);
  return taken;
}

absl::StatusOr<Staging::Held> Staging::Hold(uint64_t bytes) {
  {
    MutexLock lock(mutex_);
    auto best = free_.end();
    for (auto region = free_.begin(); region != free_.end(); ++region) {
      if (region->size() >= bytes && (best == free_.end() || region->size() < best->size())) best = region;
    }
    if (best != free_.end()) {
      Region region = std::move(*best);
      free_.erase(best);
      return Held(*this, std::move(region));
    }
  }
  absl::StatusOr<Region> region = client_.HostRegion(std::bit_ceil(std::max(bytes, kLeast)));
  if (!region.ok()) return region.status();
  return Held(*this, *std::move(region));
}

}  // namespace ashlar::engine
