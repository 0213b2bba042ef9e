// SPDX-License-Identifier: Apache-2.0
// VerifiedLayers: the number of layers of each tuple that landings under one lease have verified.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ashlar::storage {

// Landings verify layer by layer, so one number per segment is enough. The metadata thread only.
class VerifiedLayers {
 public:
  static constexpr uint32_t kAll = UINT32_MAX;

  explicit VerifiedLayers(size_t segments) : below_(segments) {}

  bool Contains(uint32_t segment, uint32_t layer) const { return layer < below_[segment]; }
  // Layers [0, below) of the segment's tuples are unchanged since publication.
  void Raise(uint32_t segment, uint32_t below) { below_[segment] = std::max(below_[segment], below); }

 private:
  std::vector<uint32_t> below_;
};

}  // namespace ashlar::storage
