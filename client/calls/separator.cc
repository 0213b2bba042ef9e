// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <string_view>
#include <vector>

#include "ashlar/client.h"

namespace ashlar {

std::vector<std::string_view> SplitBySeparator(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    const size_t end = separator.empty() ? text.npos : text.find(separator);
    if (end != 0) pieces.push_back(text.substr(0, end));
    if (end == text.npos) break;
    text.remove_prefix(end + separator.size());
  }
  return pieces;
}

std::vector<uint64_t> SplitBySeparator(std::vector<int32_t>& tokens, int32_t separator) {
  std::vector<uint64_t> lengths;
  uint64_t length = 0;
  size_t kept = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] != separator) {
      tokens[kept++] = tokens[i];
      ++length;
    }
    if (length > 0 && (tokens[i] == separator || i + 1 == tokens.size())) {
      lengths.push_back(length);
      length = 0;
    }
  }
  tokens.resize(kept);
  return lengths;
}

}  // namespace ashlar
