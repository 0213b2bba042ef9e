// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/cover.h"

#include <algorithm>

namespace ashlar::storage {

Cover BestCover(std::span<const uint64_t> resumable, std::span<const CoverSegment> segments, uint64_t head,
                uint64_t tail, absl::FunctionRef<double(uint64_t depth)> cost) {
  // The FLOPs that each segment saves, and their sums from each segment to the end.
  std::vector<double> saves(segments.size(), 0), behind(segments.size() + 1, 0);
  for (size_t i = segments.size(); i-- > 0;) {
    const CoverSegment& segment = segments[i];
    const bool interior = segment.begin > 0 && segment.begin + head + tail < segment.end;
    if (segment.hit && interior) saves[i] = cost(segment.end - tail) - cost(segment.begin + head);
    behind[i] = behind[i + 1] + saves[i];
  }
  std::vector<uint64_t> prefixes = {0};
  prefixes.insert(prefixes.end(), resumable.begin(), resumable.end());
  if (!segments.empty() && segments.front().begin == 0 && segments.front().hit) {
    const auto place = std::lower_bound(prefixes.begin(), prefixes.end(), segments.front().end);
    prefixes.insert(place, segments.front().end);
  }
  Cover best;
  size_t first = 0, best_first = 0;  // first segment that a prefix does not invalidate
  for (const uint64_t prefix : prefixes) {
    while (first < segments.size() && SpoiledBy(prefix, segments[first].begin, head)) ++first;
    const double saved = (prefix == 0 ? 0 : cost(prefix)) + behind[first];
    if (saved <= best.saved) continue;
    best.prefix = prefix;
    best.saved = saved;
    best_first = first;
  }
  for (size_t i = best_first; i < segments.size(); ++i) {
    if (saves[i] > 0) best.segments.push_back(i);
  }
  return best;
}

}  // namespace ashlar::storage
