// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace ashlar::ctl {

std::string Bytes(uint64_t bytes);     // "1.2 MiB"
std::string Duration(double seconds);  // "12 s", "4.1 min"
std::string Hex(const std::string& raw);
std::string ShortHex(const std::string& raw);        // the first 6 bytes
std::string Percent(uint64_t part, uint64_t whole);  // "93.1 %"; "–" of nothing

}  // namespace ashlar::ctl
