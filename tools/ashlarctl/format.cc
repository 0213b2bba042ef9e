#include "tools/ashlarctl/format.h"

#include <algorithm>
#include <array>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/outcome.h"

namespace ashlar::ctl {
namespace {

constexpr std::array<absl::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};

}  // namespace

std::string Bytes(uint64_t bytes) {
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

bool ParseBytes(const std::string& text, uint64_t* bytes) {
  const size_t end = text.find_first_not_of("0123456789");
  uint64_t number = 0;
  if (!absl::SimpleAtoi(text.substr(0, end), &number)) return false;
  const std::string unit(absl::StripLeadingAsciiWhitespace(end == std::string::npos ? "" : text.substr(end)));
  const auto shift = unit.empty() ? kUnits.begin() : std::ranges::find(kUnits, unit);
  if (shift == kUnits.end()) return false;
  const auto bits = static_cast<uint64_t>(10 * (shift - kUnits.begin()));
  if (number > UINT64_MAX >> bits) return false;
  *bytes = number << bits;
  return true;
}

std::string Duration(double seconds) {
  if (seconds < 1) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 10) return absl::StrFormat("%.1f s", seconds);
  if (seconds < 120) return absl::StrFormat("%.0f s", seconds);
  if (seconds < 7200) return absl::StrFormat("%.1f min", seconds / 60);
  if (seconds < 48 * 3600) return absl::StrFormat("%.1f h", seconds / 3600);
  return absl::StrFormat("%.1f days", seconds / (24 * 3600));
}

std::string Hex(const std::string& raw) {
  return absl::BytesToHexString(raw);
}

std::string ShortHex(const std::string& raw) {
  return absl::BytesToHexString(raw.substr(0, 6));
}

std::string Percent(uint64_t part, uint64_t whole) {
  if (whole == 0) return "–";
  return absl::StrFormat("%.1f %%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string TierName(uint32_t tier) {
  return std::string(Name(static_cast<TierKind>(tier)));
}

std::string ReasonName(uint32_t reason) {
  return std::string(Name(static_cast<MissReason>(reason)));
}

std::string PolicyName(uint32_t policy) {
  return std::string(Name(static_cast<PolicyKind>(policy)));
}

}  // namespace ashlar::ctl
