// SPDX-License-Identifier: Apache-2.0
// Packs many items into as few calls as the limits allow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/limits.h"

namespace ashlar::internal {

// The size that one item adds to a call.
struct Load {
  size_t bytes = 0;      // limit of the message's bytes
  uint64_t lookups = 0;  // segments to look up
};

// Returns the number of `items`, counted from the first, that one call can carry: at least one, at most `most`.
template <typename Item, typename Weigh>
size_t CountForCall(std::span<const Item> items, size_t most, Weigh weigh) {
  constexpr size_t kReserved = size_t{1} << 20;  // space in a message for everything except the items
  Load sum;
  size_t count = 0;
  for (; count < items.size() && count < most; ++count) {
    const Load load = weigh(items[count]);
    sum.bytes += load.bytes;
    sum.lookups += load.lookups;
    const bool fits = sum.bytes <= limits::kMaxRequestBytes - kReserved && sum.lookups <= limits::kMaxLookupsPerMatch;
    if (count > 0 && !fits) break;
  }
  return count;
}

// Returns one result for each item, in order. `ask(part)` makes one call for a part of the items. It returns one result
// for each of them, or an error; then `failed(item, status)` gives the result of each. A call that is refused because
// of one item (INVALID_ARGUMENT: nothing has changed) is repeated for each item alone, so that the other items do not
// miss.
template <typename Result, typename Item, typename Weigh, typename Ask, typename Failed>
std::vector<Result> AskInCalls(std::span<const Item> items, size_t most, Weigh weigh, Ask ask, Failed failed) {
  std::vector<Result> results;
  results.reserve(items.size());
  while (results.size() < items.size()) {
    const auto rest = items.subspan(results.size());
    const auto part = rest.first(CountForCall(rest, most, weigh));
    absl::StatusOr<std::vector<Result>> answers = ask(part);
    if (answers.ok()) {
      for (Result& answer : *answers) results.push_back(std::move(answer));
    } else if (absl::IsInvalidArgument(answers.status()) && part.size() > 1) {
      for (Result& answer : AskInCalls<Result>(part, 1, weigh, ask, failed)) results.push_back(std::move(answer));
    } else {
      for (const Item& item : part) results.push_back(failed(item, answers.status()));
    }
  }
  return results;
}

}  // namespace ashlar::internal
