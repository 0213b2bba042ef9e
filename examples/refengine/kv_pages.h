// SPDX-License-Identifier: Apache-2.0
// Paged keys and values of all attention layers, in memory that the caller gives (a region shared with the daemon).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "examples/refengine/config.h"
#include "kernels/kernels.h"

namespace ashlar::refengine {

// One attention layer's keys and values inside the pool's memory, in bytes, like client.h's PagedLayer: a token's row
// of head h is at offset + page × page_stride + slot × token_stride + h × head_stride.
struct PagedLayerGeometry {
  uint32_t layer = 0;  // index among all layers of the model
  uint64_t key_offset = 0, value_offset = 0;
  uint64_t page_stride = 0, token_stride = 0, head_stride = 0;
};

// Not thread-safe: only the engine's thread uses it.
class KvPages {
 public:
  static size_t RequiredBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages);

  // `memory` is 64-byte aligned, at least RequiredBytes long, and outlives the pool.
  KvPages(const ModelConfig& config, int32_t page_tokens, int32_t pages, std::span<std::byte> memory);
  KvPages(const KvPages&) = delete;
  KvPages& operator=(const KvPages&) = delete;

  int32_t page_tokens() const { return page_tokens_; }
  int32_t pages() const { return pages_; }
  int32_t free_pages() const { return static_cast<int32_t>(free_.size()); }

  // A page id valid in every layer; nothing if the pool is exhausted.
  std::optional<int32_t> Allocate();
  void Free(int32_t page);

  // Attention layers are numbered separately here: 0 … config.attention_layers() − 1.
  static PagedLayerGeometry Geometry(const ModelConfig& config, int32_t page_tokens, int32_t pages,
                                     int32_t attention_layer);
  PagedLayerGeometry Geometry(int32_t attention_layer) const {
    return Geometry(config_, page_tokens_, pages_, attention_layer);
  }
  kernels::PagedSlots Keys(int32_t attention_layer, const int32_t* page_table) const;
  kernels::PagedSlots Values(int32_t attention_layer, const int32_t* page_table) const;

 private:
  kernels::PagedSlots Slots(uint64_t offset, const int32_t* page_table) const;

  ModelConfig config_;
  int32_t page_tokens_, pages_;
  std::byte* memory_;
  std::vector<int32_t> free_;
};

}  // namespace ashlar::refengine
