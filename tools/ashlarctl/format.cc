// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/format.h"

#include <algorithm>
#include <array>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/outcome.h"

namespace ashlar::ctl {
namespace {

constexpr std::array<absl::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};

// Bytes of the first character of `text`; 0 if it is not valid UTF-8.
size_t CharacterBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  const size_t bytes = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (bytes < 3) return bytes;
  // Overlong encodings, halves of surrogate pairs, and values past the last character.
  const uint8_t second = byte(1);
  const bool none = (lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
                    (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f);
  return none ? 0 : bytes;
}

// Characters that a terminal interprets or does not show, so that one name can look like another: controls, format
// characters (Unicode's Cf: directions, zero-width ones), line separators, fillers and variation selectors.
bool IsHidden(uint32_t code) {
  static constexpr struct {
    uint32_t first, last;
  } kHidden[] = {{0x0000, 0x001f},   {0x007f, 0x009f},   {0x00ad, 0x00ad},   {0x034f, 0x034f},   {0x0600, 0x0605},
                 {0x061c, 0x061c},   {0x06dd, 0x06dd},   {0x070f, 0x070f},   {0x0890, 0x0891},   {0x08e2, 0x08e2},
                 {0x115f, 0x1160},   {0x17b4, 0x17b5},   {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},
                 {0x2060, 0x206f},   {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},   {0xffa0, 0xffa0},
                 {0xfff0, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f}, {0x1bca0, 0x1bca3},
                 {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff}};
  return std::ranges::any_of(kHidden, [&](const auto& range) { return code >= range.first && code <= range.last; });
}

uint32_t CodeOf(absl::string_view character) {
  const auto lead = static_cast<uint8_t>(character[0]);
  uint32_t code = character.size() == 1 ? lead : lead & (0x7fu >> character.size());
  for (const char byte : character.substr(1)) code = code << 6 | (static_cast<uint8_t>(byte) & 0x3fu);
  return code;
}

std::string Escaped(absl::string_view text, absl::string_view kept) {
  std::string out;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const absl::string_view next = text.substr(0, bytes == 0 ? 1 : bytes);
    if (kept.find(next[0]) != absl::string_view::npos || (bytes > 0 && !IsHidden(CodeOf(next)))) {
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

std::string PrintableJson(const std::string& dumped) {
  std::string out;
  for (absl::string_view rest = dumped; !rest.empty();) {
    const absl::string_view next = rest.substr(0, std::max<size_t>(CharacterBytes(rest), 1));
    const uint32_t code = CodeOf(next);
    rest.remove_prefix(next.size());
    if (next == "\n" || !IsHidden(code)) {
      absl::StrAppend(&out, next);
    } else if (code < 0x10000) {
      absl::StrAppendFormat(&out, "\\u%04x", code);
    } else {
      absl::StrAppendFormat(&out, "\\u%04x\\u%04x", 0xd7c0 + (code >> 10), 0xdc00 + (code & 0x3ff));
    }
  }
  return out;
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
