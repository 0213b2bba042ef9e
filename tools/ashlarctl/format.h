// Numbers as people read them, and the names of what the daemon sends as numbers (proto/outcome.h).
#pragma once

#include <cstdint>
#include <string>

namespace ashlar::ctl {

std::string Bytes(uint64_t bytes);                          // "1.2 MiB"
bool ParseBytes(const std::string& text, uint64_t* bytes);  // "64GiB", "512 MiB", "4096"
std::string Duration(double seconds);                       // "12 s", "4.1 min"
std::string Hex(const std::string& raw);
std::string ShortHex(const std::string& raw);        // the first 6 bytes
std::string Percent(uint64_t part, uint64_t whole);  // "93.1 %"; "–" of nothing

std::string TierName(uint32_t tier);
std::string ReasonName(uint32_t reason);
std::string PolicyName(uint32_t policy);

}  // namespace ashlar::ctl
