// SPDX-License-Identifier: Apache-2.0
// Numbers made from tokens.
#pragma once

#include <cstdint>
#include <span>

#include "client/session/client.h"

namespace ashlar::integration {

// For every test engine's layout.
inline constexpr uint32_t kPageTokens = 16;
inline constexpr uint32_t kKeyHeads = 2, kValueHeads = 4, kDk = 32, kDv = 24;
inline constexpr uint32_t kChannels = 48, kConvKernel = 4;

inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The numbers of one tensor of one run.
class Content {
 public:
  Content(ObjectKind kind, std::span<const int32_t> run, uint32_t layer, PartForm form, uint32_t rank) {
    seed_ = static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(kind) << 32 | layer << 8 |
            static_cast<uint64_t>(form);
    for (int32_t token : run) seed_ = Mix(seed_ + 0x9e3779b97f4a7c15u + static_cast<uint32_t>(token));
  }
  float At(uint64_t index) const {
    return static_cast<float>(static_cast<int32_t>(Mix(seed_ + index) >> 32)) / 2147483648.0f;
  }
  void Write(float* target, uint64_t first, uint64_t count) const {
    for (uint64_t i = 0; i < count; ++i) target[i] = At(first + i);
  }

 private:
  uint64_t seed_;
};

}  // namespace ashlar::integration
