// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/shared_places.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

RowArray BlockAt(uint64_t offset, uint64_t bytes) {
  return {offset, bytes, {{{0, 1}, {0, 1}, {0, 1}}}};
}

}  // namespace

absl::StatusOr<const Region*> SharedPlaces::FindRegion(const std::string& field, uint64_t handle) {
  std::shared_ptr<const Region>& region = regions_[handle];
  if (region == nullptr) {
    region = session_.FindRegion(handle);
    if (region == nullptr) return Invalid(field, ".region: unknown handle ", handle);
    if (absl::Status whole = region->CheckWhole(absl::StrCat(field, ".region")); !whole.ok()) return whole;
  }
  if (!gpu_.has_value()) gpu_ = region->gpu();
  if (*gpu_ != region->gpu())
    return Invalid(
        field, ".region: is in different memory than the earlier regions; put all on the same GPU, or all on the host");
  return region.get();
}

absl::StatusOr<std::byte*> SharedPlaces::Block(const std::string& field, uint64_t region, uint64_t offset,
                                               uint64_t bytes, uint64_t alignment) {
  const absl::StatusOr<const Region*> found = FindRegion(field, region);
  if (!found.ok()) return found.status();
  if (offset % alignment != 0) return Invalid(field, ".offset: must be aligned to ", alignment, " bytes");
  if (!(*found)->Contains(offset, bytes)) {
    return Invalid(field, ".offset: exceeds the region of ", (*found)->size(), " bytes");
  }
  places_.push_back({field, *found, BlockAt(offset, bytes), true, Access::kWrite});
  return (*found)->data() + offset;
}

absl::StatusOr<float*> SharedPlaces::Rows(const std::string& field, uint64_t region, uint64_t offset, uint64_t stride,
                                          uint64_t rows, uint64_t row_bytes, Access access) {
  const absl::StatusOr<const Region*> found = FindRegion(field, region);
  if (!found.ok()) return found.status();
  if (offset % sizeof(float) != 0) return Invalid(field, ".offset: must be aligned to ", sizeof(float), " bytes");
  if (stride % sizeof(float) != 0) return Invalid(field, ".stride: must be aligned to ", sizeof(float), " bytes");
  const RowArray array{offset, row_bytes, {{{stride, rows}, {0, 1}, {0, 1}}}};
  if (array.End() > (*found)->size()) {
    return Invalid(field, ".offset: the last row exceeds the region of ", (*found)->size(), " bytes");
  }
  if (!array.Disjoint()) return Invalid(field, ".stride: rows of ", row_bytes, " bytes overlap");
  places_.push_back({field, *found, array, false, access});
  return reinterpret_cast<float*>((*found)->data() + offset);
}

// There may be thousands of blocks (checkpoints), which are sorted. There are few arrays of rows; each is compared with
// everything.
absl::Status SharedPlaces::CheckApart() {
  const auto clash = [](const Place& a, const Place& b) {
    return Invalid(a.field, ".offset: overlaps ", b.field, ", and the call writes one of them");
  };
  std::ranges::sort(places_, [](const Place& a, const Place& b) {
    return std::tuple(!a.is_block, a.region, a.rows.offset) < std::tuple(!b.is_block, b.region, b.rows.offset);
  });
  // All blocks are disjoint if neighbours are.
  for (size_t i = 1; i < places_.size() && places_[i].is_block; ++i) {
    const Place &before = places_[i - 1], &place = places_[i];
    if (before.region == place.region && before.rows.End() > place.rows.offset) return clash(place, before);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].is_block) continue;
    for (size_t j = 0; j < i; ++j) {
      const Place &a = places_[i], &b = places_[j];
      const bool written = a.access == Access::kWrite || b.access == Access::kWrite;
      if (written && a.region == b.region && Overlap(a.rows, b.rows)) return clash(a, b);
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<const void> SharedPlaces::keep() const {
  return std::make_shared<std::map<uint64_t, std::shared_ptr<const Region>>>(regions_);
}

}  // namespace ashlar::daemon
