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

// The bytes of the character that `text` begins with; 0: it begins with none of UTF-8's.
size_t CharacterBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  const size_t bytes = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (bytes < 3) return bytes;
  // Longer forms of shorter characters, halves of surrogate pairs, and what lies beyond the last character.
  const uint8_t second = byte(1);
  const bool none = (lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
                    (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f);
  return none ? 0 : bytes;
}

// C0, DEL and C1, which begins with 0xc2 in UTF-8.
bool IsControl(absl::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  return first == 0xc2 && static_cast<uint8_t>(character[1]) < 0xa0;
}

std::string Escaped(absl::string_view text, absl::string_view kept) {
  std::string out;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const absl::string_view next = text.substr(0, bytes == 0 ? 1 : bytes);
    if (kept.find(next[0]) != absl::string_view::npos || (bytes > 0 && !IsControl(next))) {
      absl::StrAppend(&out, next);
    } else {
      for (const char each : next) absl::StrAppendFormat(&out, "\\x%02x", static_cast<uint8_t>(each));
    }
    text.remove_prefix(next.size());
  }
  return out;
}

}  // namespace

std::string Printable(absl::string_view text) {
  return Escaped(text, "");
}

std::string PrintableLines(absl::string_view text) {
  return Escaped(text, "\n\t");
}

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
