#include "daemon/row_array.h"

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

// A plane, or what is left of it inside one step of its outer dimensions.
struct Nest {
  int64_t begin;
  int64_t row_bytes;
  std::span<const Step> steps;  // that are really taken, from the largest stride to the smallest

  int64_t end() const {
    int64_t end = begin + row_bytes;
    for (const Step& step : steps) end += step.stride * (step.count - 1);
    return end;
  }
  int64_t stride() const { return steps.empty() ? 0 : steps.front().stride; }
  Nest Inner() const { return {begin, row_bytes, steps.subspan(1)}; }
};

// `room` holds the steps.
Nest NestOf(const RowArray& array, std::array<Step, 3>& room) {
  size_t taken = 0;
  for (const RowArray::Dimension& d : array.dimensions) {
    if (d.count > 1) room[taken++] = {static_cast<int64_t>(d.stride), static_cast<int64_t>(d.count)};
  }
  const std::span<Step> steps(room.data(), taken);
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
  // Steps i of a and j of b are taken together: what is inside them meets or not by j − i alone.
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
  // Of what fits into one stride two neighbours at most can meet. More: the planes step differently.
  if (last - first > 1) return true;
  for (int64_t step = first; step <= last; ++step) {
    if (Overlap(a, Nest{b.begin + step * stride, b.row_bytes, b.steps})) return true;
  }
  return false;
}

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
  struct Entry {
    Nest nest;
    int64_t end;
    size_t index;
  };
  std::vector<std::array<Step, 3>> steps(arrays.size());
  std::vector<Entry> ascending;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Nest nest = NestOf(arrays[i], steps[i]);
    ascending.push_back({nest, nest.end(), i});
  }
  std::ranges::sort(ascending, {}, [](const Entry& entry) { return entry.nest.begin; });
  for (size_t i = 0; i < ascending.size(); ++i) {
    for (size_t j = i + 1; j < ascending.size() && ascending[j].nest.begin < ascending[i].end; ++j) {
      if (Overlap(ascending[i].nest, ascending[j].nest)) return std::pair{ascending[i].index, ascending[j].index};
    }
  }
  return std::nullopt;
}

}  // namespace ashlar::daemon
