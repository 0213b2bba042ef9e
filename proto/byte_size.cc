// SPDX-License-Identifier: Apache-2.0
#include "proto/byte_size.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/numeric/int128.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ashlar {
namespace {

constexpr absl::string_view kDigits = "0123456789";
constexpr absl::string_view kPrefixes = "kmgtp";
constexpr size_t kMostDecimals = 18;  // 10^18 fits in 64 bits
constexpr size_t kLongestShown = 40;  // longest refused text that a message quotes

// Returns the bytes of a unit in lower case; 0 if it is not a unit.
uint64_t UnitBytes(absl::string_view unit) {
  if (unit.empty() || unit == "b") return 1;
  const size_t power = kPrefixes.find(unit[0]);
  if (power == absl::string_view::npos) return 0;
  const absl::string_view rest = unit.substr(1);
  const bool decimal = rest == "b";
  if (!decimal && rest != "" && rest != "i" && rest != "ib") return 0;
  uint64_t bytes = 1;
  for (size_t i = 0; i <= power; ++i) bytes *= decimal ? 1000 : 1024;
  return bytes;
}

absl::string_view TakeDigits(absl::string_view& text) {
  const absl::string_view digits = text.substr(0, std::min(text.find_first_not_of(kDigits), text.size()));
  text.remove_prefix(digits.size());
  return digits;
}

absl::Status Bad(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("\"", absl::Utf8SafeCHexEscape(text.substr(0, kLongestShown)), "\" ",
                                                 why, "; expected a size like 4096, 64GiB, 512M or 10GB"));
}

}  // namespace

absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text) {
  absl::string_view rest = text;
  const absl::string_view whole = TakeDigits(rest);
  absl::string_view decimals;
  if (absl::string_view after = rest; !after.empty() && after[0] == '.') {
    after.remove_prefix(1);
    decimals = TakeDigits(after);
    if (decimals.empty()) return Bad(text, "is not a size");
    rest = after;
  }
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(rest));
  const uint64_t unit_bytes = UnitBytes(unit);
  if (whole.empty() || unit_bytes == 0 || decimals.size() > kMostDecimals) return Bad(text, "is not a size");
  uint64_t number = 0, fraction = 0, scale = 1;
  if (!absl::SimpleAtoi(whole, &number)) return Bad(text, "is out of range");
  if (!decimals.empty() && !absl::SimpleAtoi(decimals, &fraction)) return Bad(text, "is not a size");
  for (size_t i = 0; i < decimals.size(); ++i) scale *= 10;
  const absl::uint128 bytes =
      absl::uint128(number) * unit_bytes + absl::uint128(fraction) * unit_bytes / absl::uint128(scale);
  if (bytes > std::numeric_limits<uint64_t>::max()) return Bad(text, "is out of range");
  return absl::Uint128Low64(bytes);
}

}  // namespace ashlar
