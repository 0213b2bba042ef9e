// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/row_array.h"

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <vector>

namespace ashlar::daemon {
namespace {

struct Step {
  int64_t stride;
  int64_t count;
};

// A plane, or the rest of it inside one step of its outer dimensions.
struct Nest {
  int64_t begin;
  int64_t row_bytes;
  std::span<const Step> steps;  // dimensions with more than one step, largest stride first

  int64_t end() const {
    int64_t end = begin + row_bytes;
    for (const Step& step : steps) end += step.stride * (step.count - 1);
    return end;
  }
  int64_t stride() const { return steps.empty() ? 0 : steps.front().stride; }
  Nest Inner() const { return {begin, row_bytes, steps.subspan(1)}; }
};

// `storage` stores the steps.
Nest NestOf(const RowArray& array, std::array<Step, 3>& storage) {
  size_t taken = 0;
  for (const RowArray::Dimension& d : array.dimensions) {
    if (d.count > 1) storage[taken++] = {static_cast<int64_t>(d.stride), static_cast<int64_t>(d.count)};
  }
  const std::span<Step> steps(storage.data(), taken);
  std::ranges::sort(steps, std::greater(), &Step::stride);
  return {static_cast<int64_t>(array.offset), static_cast<int64_t>(array.row_bytes), steps};
}

int64_t FloorDivide(int64_t a, int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

bool Overlap(Nest a, Nest b) {
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  const int64_t stride = std::max(a.stride(), b.stride());
  if (stride == 0) return true;  // two rows
  // Steps i of a and j of b: whether their contents overlap depends only on j − i.
  int64_t first = 0, last = 0;
  if (a.stride() == stride) {
    first = 1 - a.steps.front().count;
    a = a.Inner();
  }
  if (b.stride() == stride) {
    last = b.steps.front().count - 1;
    b = b.Inner();
  }
  first = std::max(first, FloorDivide(a.begin - b.end(), stride) + 1);
  last = std::min(last, FloorDivide(a.end() - 1 - b.begin, stride));
  // If everything fits in one stride, only two neighbours can overlap. More means that the planes have different
  // strides.
  if (last - first > 1) return true;
  for (int64_t step = first; step <= last; ++step) {
    if (Overlap(a, Nest{b.begin + step * stride, b.row_bytes, b.steps})) return true;
  }
  return false;
}

// Finds two overlapping planes among many. Interleaved planes mostly have the same outer steps: then one step of each
// plane, reduced to one stride, decides for all steps. So sorting separates the planes, once per dimension; only planes
// that overlap in this way are compared pairwise.
class OverlapSearch {
 public:
  using Pair = std::pair<size_t, size_t>;

  explicit OverlapSearch(std::span<const RowArray> arrays)
      : steps_(arrays.size()), laid_(kOfEach * arrays.size()), compared_(kOfEach * arrays.size()) {
    for (size_t i = 0; i < arrays.size(); ++i) planes_.push_back({NestOf(arrays[i], steps_[i]), i});
  }

  std::optional<Pair> Run() { return Among(planes_); }

 private:
  // A plane, or its projection into one stride; a plane may have several.
  struct Piece {
    Nest nest;
    size_t plane;
    int64_t begin() const { return nest.begin; }
  };

  // Returns two overlapping planes among the pieces.
  std::optional<Pair> Among(std::vector<Piece> pieces) {
    std::ranges::sort(pieces, {}, &Piece::begin);
    for (size_t first = 0, next; first < pieces.size(); first = next) {
      int64_t end = pieces[first].nest.end();
      for (next = first + 1; next < pieces.size() && pieces[next].begin() < end; ++next) {
        end = std::max(end, pieces[next].nest.end());
      }
      if (next - first == 1) continue;
      if (const auto found = AmongThatMeet(std::span(pieces).subspan(first, next - first))) return found;
    }
    return std::nullopt;
  }

  // Sorted, with ranges without gaps.
  std::optional<Pair> AmongThatMeet(std::span<const Piece> pieces) {
    int64_t stride = 0;
    for (const Piece& piece : pieces) stride = std::max(stride, piece.nest.stride());
    if (stride == 0) return TwoByTwo(pieces);  // touching rows
    // With very different strides, each call strips only one or two planes.
    if (laid_ < pieces.size()) return TwoByTwo(pieces);
    laid_ -= pieces.size();
    std::vector<Piece> inside;
    for (const Piece& piece : pieces) {
      Nest nest = piece.nest.stride() == stride ? piece.nest.Inner() : piece.nest;
      nest.begin = (nest.begin - pieces.front().begin()) % stride;
      if (nest.end() - nest.begin > stride) return TwoByTwo(pieces);
      inside.push_back({nest, piece.plane});
      if (nest.end() <= stride) continue;
      nest.begin -= stride;  // its end wraps to the start of the stride
      inside.push_back({nest, piece.plane});
    }
    return Among(std::move(inside));
  }

  std::optional<Pair> TwoByTwo(std::span<const Piece> pieces) {
    std::vector<Piece> planes;
    for (const Piece& piece : pieces) planes.push_back(planes_[piece.plane]);
    std::ranges::sort(planes, {}, [](const Piece& plane) { return std::pair(plane.begin(), plane.plane); });
    const auto same = [](const Piece& a, const Piece& b) { return a.plane == b.plane; };
    planes.erase(std::unique(planes.begin(), planes.end(), same), planes.end());
    for (size_t i = 0; i < planes.size(); ++i) {
      const int64_t end = planes[i].nest.end();
      for (size_t j = i + 1; j < planes.size() && planes[j].begin() < end; ++j) {
        const Pair pair(planes[i].plane, planes[j].plane);
        if (compared_-- == 0 || Overlap(planes[i].nest, planes[j].nest)) return pair;
      }
    }
    return std::nullopt;
  }

  static constexpr size_t kOfEach = 16;

  std::vector<std::array<Step, 3>> steps_;
  std::vector<Piece> planes_;
  size_t laid_, compared_;  // remaining limits on pieces and pairs
};

}  // namespace

absl::uint128 RowArray::End() const {
  absl::uint128 end = absl::uint128(offset) + row_bytes;
  for (const Dimension& d : dimensions) end += absl::uint128(d.stride) * (d.count - 1);
  return end;
}

bool RowArray::Disjoint() const {
  std::array<Dimension, 3> nested = dimensions;
  std::ranges::sort(nested, std::less(), &Dimension::stride);
  absl::uint128 inner = row_bytes;
  for (const Dimension& d : nested) {
    if (d.count == 1) continue;
    if (absl::uint128(d.stride) < inner) return false;
    inner += absl::uint128(d.stride) * (d.count - 1);
  }
  return true;
}

bool Overlap(const RowArray& a, const RowArray& b) {
  std::array<Step, 3> a_steps, b_steps;
  return Overlap(NestOf(a, a_steps), NestOf(b, b_steps));
}

std::optional<std::pair<size_t, size_t>> FindOverlap(std::span<const RowArray> arrays) {
  return OverlapSearch(arrays).Run();
}

}  // namespace ashlar::daemon
