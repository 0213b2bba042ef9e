// SPDX-License-Identifier: Apache-2.0
// Text as UTF-8 bytes: ids 0–255 are bytes, a few special tokens follow.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ashlar::refengine {

inline constexpr int32_t kBeginToken = 256;      // begins a prompt
inline constexpr int32_t kSeparatorToken = 257;  // between segments (PIC_SEPARATOR, HYPIC §5)
inline constexpr int32_t kEndToken = 258;        // ends a generated text
inline constexpr int32_t kVocabulary = 272;      // rounded up for the matrix product; the rest are never produced

std::vector<int32_t> Tokenize(std::string_view text);
// Special tokens have no text.
std::string Detokenize(std::span<const int32_t> tokens);

}  // namespace ashlar::refengine
