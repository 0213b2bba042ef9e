// SPDX-License-Identifier: Apache-2.0
// Random contexts of attention: spans of keys and values in pages, in each of the three kinds of stored keys, and
// queries.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"

namespace ashlar::kernels::testing {

// The operations, in the order of their keys: landed, unrotated, zero-based.
using AttendOperation = Event (Kernels::*)(const AttendArgs&, Queue&) const;
enum class Stand { kLanded, kUnrotated, kZeroBased };
inline constexpr Stand kStands[] = {Stand::kLanded, Stand::kUnrotated, Stand::kZeroBased};
AttendOperation OperationFor(Stand stand);
std::string NameOf(Stand stand);

struct SpanPlace {
  int64_t tokens = 0;
  int64_t position = 0;
  int64_t origin = 0;  // ≤ position
};

struct AttentionCase {
  AttentionShape shape;
  RowFormat format;  // format of keys and values
  RopeStyle style = RopeStyle::kHalfSplit;
  int32_t rotary_dim = 0;
  float rope_scale = 1;
  std::vector<SpanPlace> spans;
  std::vector<int64_t> queries;  // their positions
};
std::string Describe(const AttentionCase& what);
// A few spans, the last of which ends at the queries' position, somewhere beyond `start`.
AttentionCase RandomCase(Random& random, AttentionKind kind, RowFormat format, int64_t start);

// Outputs of one call.
struct Attended {
  std::vector<float> out, lse;
};
// The largest of ‖a − b‖ / ‖b‖ over output rows, and |a − b| over lse. A row without visible keys must be zero in both.
double LargestError(const AttentionShape& shape, const Attended& actual, const Attended& expected);

// The context of a case. Its pages hold one random set of keys and values in all three forms: zero-based keys are
// rotated in fp64, and landed ones are made from those by the reference's Land.
class AttentionContext {
 public:
  AttentionContext(Random& random, const AttentionCase& what);

  // All spans, or some of them.
  AttendArgs Args(Stand stand, size_t first_span = 0, size_t spans = SIZE_MAX) const;
  Attended Run(Runner& runner, Stand stand) const { return Run(runner, stand, Args(stand)); }
  // With separate outputs.
  Attended Run(Runner& runner, Stand stand, AttendArgs args) const;

  const std::vector<double>& frequencies() const { return frequencies_; }
  std::vector<KeySpan> Spans(Stand stand) const { return spans_[static_cast<size_t>(stand)]; }

 private:
  void AddSpan(Random& random, const SpanPlace& place);

  const AttentionCase what_;
  std::vector<double> frequencies_;
  std::vector<std::unique_ptr<Pages>> pages_;
  std::vector<KeySpan> spans_[3];  // indexed by Stand
  std::vector<float> queries_;
};

}  // namespace ashlar::kernels::testing
