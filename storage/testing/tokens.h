// SPDX-License-Identifier: Apache-2.0
// Texts for tests of prefixes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace ashlar::storage {

using Tokens = std::vector<int32_t>;

inline Tokens Numbers(int32_t first, int32_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline Tokens Join(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Tokens First(const Tokens& tokens, size_t count) {
  return {tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count)};
}

}  // namespace ashlar::storage
