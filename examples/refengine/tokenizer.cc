// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {

std::vector<int32_t> Tokenize(std::string_view text) {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size());
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

std::string Detokenize(std::span<const int32_t> tokens) {
  std::string text;
  for (const int32_t token : tokens) {
    if (token >= 0 && token < 256) text.push_back(static_cast<char>(token));
  }
  return text;
}

}  // namespace ashlar::refengine
