// SPDX-License-Identifier: Apache-2.0
// Token ids on the wire: packed little-endian int32. A varint would take up to 5 bytes per token, and 10 for negative
// ids.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

inline std::string PackTokens(std::span<const int32_t> tokens) {
  static_assert(std::endian::native == std::endian::little);
  return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
}

inline absl::StatusOr<std::vector<int32_t>> UnpackTokens(absl::string_view bytes) {
  if (bytes.size() % sizeof(int32_t) != 0)
    return absl::InvalidArgumentError("tokens: length is not a multiple of 4 bytes (int32)");
  std::vector<int32_t> tokens(bytes.size() / sizeof(int32_t));
  if (!tokens.empty()) std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

}  // namespace ashlar
