// SPDX-License-Identifier: Apache-2.0
// Formats numbers and untrusted texts for people, and names what the daemon sends as numbers (proto/outcome.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ashlar::ctl {

std::string Bytes(uint64_t bytes);     // "1.2 MiB"
std::string Duration(double seconds);  // "12 s", "4.1 min"
std::string Hex(const std::string& raw);
std::string ShortHex(const std::string& raw);        // the first 6 bytes
std::string Percent(uint64_t part, uint64_t whole);  // "93.1 %"; "–" if `whole` is 0

// Names of engines and models may contain any bytes. Control characters, characters that are invisible or change the
// direction of text, and bytes that are not UTF-8 become \xNN, so that none of them moves a terminal's cursor, begins a
// line or makes one name look like another.
std::string Printable(absl::string_view text);
// The same for a whole answer, keeping its line breaks.
std::string PrintableLines(absl::string_view text);
// The same for a JSON document, which is UTF-8: such characters become \uNNNN.
std::string PrintableJson(const std::string& dumped);

std::string TierName(uint32_t tier);
std::string ReasonName(uint32_t reason);
std::string PolicyName(uint32_t policy);

}  // namespace ashlar::ctl
