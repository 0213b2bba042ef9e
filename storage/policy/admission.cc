// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/admission.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ashlar::storage {
namespace {

constexpr double kLeastUsed = 0.25;  // at most about four bytes are written for one that is used

}  // namespace

FrequencySketch::FrequencySketch(size_t keys)
    : columns_(std::bit_ceil(std::max<size_t>(keys, 16))), counters_(kRows * columns_ / 16) {}

size_t FrequencySketch::Place(TenantId tenant, const Key& key, size_t row) const {
  // Keys are SHA-256, so any eight bytes are a hash that is independent of the others.
  uint64_t word = 0;
  std::memcpy(&word, key.bytes.data() + row * sizeof word, sizeof word);
  return row * columns_ + ((word ^ tenant * 0x9E3779B97F4A7C15u) & (columns_ - 1));
}

void FrequencySketch::Add(TenantId tenant, const Key& key) {
  for (size_t row = 0; row < kRows; ++row) {
    const size_t place = Place(tenant, key, row);
    if (Count(place) < kMost) counters_[place / 16] += uint64_t{1} << (place % 16 * 4);
  }
  if (++added_ == 10 * columns_) Halve();
}

uint32_t FrequencySketch::Estimate(TenantId tenant, const Key& key) const {
  uint32_t least = kMost;
  for (size_t row = 0; row < kRows; ++row) least = std::min(least, Count(Place(tenant, key, row)));
  return least;
}

void FrequencySketch::Halve() {
  for (uint64_t& word : counters_) word = word >> 1 & 0x7777777777777777u;
  added_ /= 2;
}

void AdmissionPolicy::Seen(TenantId tenant, const Key& key) {
  seen_.Add(tenant, key);
}

bool AdmissionPolicy::AdmitsEvicted(TenantId tenant, const Key& key, const LaterUses::Subject& subject,
                                    uint64_t extents, uint64_t horizon) {
  return later_[tenant].Evicted(key, subject, extents, horizon) >= kLeastUsed;
}

bool AdmissionPolicy::Admits(TenantId tenant, const Key& key, const std::optional<Key>& victim) const {
  switch (mode_) {
    case AdmissionMode::kAll:
      return true;
    case AdmissionMode::kSecondUse:
      return seen_.Estimate(tenant, key) >= 2;
    case AdmissionMode::kTinyLfu:
      return !victim || seen_.Estimate(tenant, key) > seen_.Estimate(tenant, *victim);
  }
  return false;
}

}  // namespace ashlar::storage
