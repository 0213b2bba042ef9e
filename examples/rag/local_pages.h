// SPDX-License-Identifier: Apache-2.0
// Pages of an engine in memory that is not shared with a daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "examples/refengine/kv_pages.h"

namespace ashlar::rag {

inline constexpr int32_t kPageTokens = 16;

// Returns the number of pages for `prompts` prompts of `tokens` tokens.
inline int32_t PagesFor(size_t tokens, size_t prompts) {
  return static_cast<int32_t>((tokens / kPageTokens + 2) * prompts);
}

class LocalPages {
 public:
  LocalPages(const refengine::ModelConfig& config, int32_t pages)
      : memory_(refengine::KvPages::RequiredBytes(config, kPageTokens, pages) / kLine + 1),
        pool_(config, kPageTokens, pages, std::as_writable_bytes(std::span(memory_))) {}
  refengine::KvPages& pool() { return pool_; }

 private:
  static constexpr size_t kLine = 64;
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::vector<Line> memory_;
  refengine::KvPages pool_;
};

}  // namespace ashlar::rag
