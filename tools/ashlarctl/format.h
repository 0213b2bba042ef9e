// SPDX-License-Identifier: Apache-2.0
// Numbers and foreign texts as people read them, and the names of what the daemon sends as numbers (proto/outcome.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ashlar::ctl {

std::string Bytes(uint64_t bytes);     // "1.2 MiB"
std::string Duration(double seconds);  // "12 s", "4.1 min"
std::string Hex(const std::string& raw);
std::string ShortHex(const std::string& raw);        // the first 6 bytes
std::string Percent(uint64_t part, uint64_t whole);  // "93.1 %"; "–" of nothing

// An engine calls itself and its model by any bytes. Control characters, characters that are not visible or change the
// direction of text, and bytes that are no UTF-8, become \xNN: none of it moves a terminal's cursor, begins a line or
// makes one name look like another.
std::string Printable(absl::string_view text);
// Likewise of a whole answer, whose lines stay apart.
std::string PrintableLines(absl::string_view text);
// Likewise of a JSON document, which is UTF-8: such characters become \uNNNN.
std::string PrintableJson(const std::string& dumped);

std::string TierName(uint32_t tier);
std::string ReasonName(uint32_t reason);
std::string PolicyName(uint32_t policy);

}  // namespace ashlar::ctl
