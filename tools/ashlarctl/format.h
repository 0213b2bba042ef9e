// Numbers and foreign texts as people read them, and the names of what the daemon sends as numbers (proto/outcome.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ashlar::ctl {

std::string Bytes(uint64_t bytes);                          // "1.2 MiB"
bool ParseBytes(const std::string& text, uint64_t* bytes);  // "64GiB", "512 MiB", "4096"
std::string Duration(double seconds);                       // "12 s", "4.1 min"
std::string Hex(const std::string& raw);
std::string ShortHex(const std::string& raw);        // the first 6 bytes
std::string Percent(uint64_t part, uint64_t whole);  // "93.1 %"; "–" of nothing

// An engine calls itself and its model by any bytes. Control characters, and bytes that are no UTF-8, become
// \xNN: none of it moves a terminal's cursor or begins a line.
std::string Printable(absl::string_view text);
// Likewise of a whole answer, whose lines stay apart.
std::string PrintableLines(absl::string_view text);

std::string TierName(uint32_t tier);
std::string ReasonName(uint32_t reason);
std::string PolicyName(uint32_t policy);

}  // namespace ashlar::ctl
