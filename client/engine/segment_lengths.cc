// SPDX-License-Identifier: Apache-2.0
// Cuts a prompt at a separator. ashlar/boundaries.py has the same rules; testdata/segment_lengths.txt tests both.
#include <algorithm>
#include <span>
#include <vector>

#include "client/engine/boundary.h"
#include "client/engine/status.h"

namespace ashlar::engine {
namespace {

std::vector<uint64_t> CutAtSeparators(std::span<const int32_t> tokens, std::span<const int32_t> separator,
                                      uint64_t min_tokens) {
  std::vector<uint64_t> lengths;
  uint64_t end = 0, before = min_tokens;  // end of the last segment, and its length before it was joined
  for (uint64_t next = separator.size(); next <= tokens.size(); ++next) {
    if (!std::ranges::equal(tokens.subspan(next - separator.size(), separator.size()), separator)) continue;
    const uint64_t length = next - end;
    // A segment below the minimum is not joined with longer neighbours, because that would change their names.
    if (length < min_tokens && before < min_tokens) {
      lengths.back() += length;
    } else {
      lengths.push_back(length);
    }
    end = next;
    before = length;
  }
  if (!lengths.empty() && end == tokens.size()) lengths.pop_back();
  return lengths;
}

}  // namespace

Status SegmentLengths(const int32_t* tokens, uint64_t token_count, const int32_t* separator, uint64_t separator_count,
                      uint64_t min_tokens, uint64_t* lengths, uint64_t capacity, uint64_t* count) noexcept {
  return Guarded([&]() -> Status {
    if (tokens == nullptr && token_count > 0) return Invalid("tokens: null");
    if (separator_count == 0) return Invalid("separator: no tokens; expected at least one");
    if (separator == nullptr) return Invalid("separator: null");
    if (lengths == nullptr && capacity > 0) return Invalid("lengths: null");
    if (count == nullptr) return Invalid("count: null");
    const std::vector<uint64_t> found =
        CutAtSeparators({tokens, token_count}, {separator, separator_count}, min_tokens);
    *count = found.size();
    if (found.size() <= capacity) std::ranges::copy(found, lengths);
    return {};
  });
}

}  // namespace ashlar::engine
