// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/kv_pages.h"

#include <cstdio>
#include <cstdlib>

namespace ashlar::refengine {
namespace {

uint64_t PlaneBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages) {
  const AttentionConfig& attention = config.attention;
  return uint64_t{sizeof(float)} * attention.kv_heads * attention.head_dim * page_tokens * pages;
}

}  // namespace

size_t KvPages::RequiredBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages) {
  return 2 * config.attention_layers() * PlaneBytes(config, page_tokens, pages);
}

KvPages::KvPages(const ModelConfig& config, int32_t page_tokens, int32_t pages, std::span<std::byte> memory)
    : config_(config), page_tokens_(page_tokens), pages_(pages), memory_(memory.data()) {
  if (memory.size() < RequiredBytes(config, page_tokens, pages)) {
    std::fprintf(stderr, "page pool: memory: %zu bytes, %zu are needed\n", memory.size(),
                 RequiredBytes(config, page_tokens, pages));
    std::abort();
  }
  for (int32_t page = pages - 1; page >= 0; --page) free_.push_back(page);
}

std::optional<int32_t> KvPages::Allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void KvPages::Free(int32_t page) {
  free_.push_back(page);
}

PagedLayerGeometry KvPages::Geometry(const ModelConfig& config, int32_t page_tokens, int32_t pages,
                                     int32_t attention_layer) {
  const uint64_t plane = PlaneBytes(config, page_tokens, pages);
  PagedLayerGeometry geometry;
  geometry.layer = attention_layer * ModelConfig::kLayersPerBlock + ModelConfig::kLayersPerBlock - 1;
  geometry.key_offset = 2 * attention_layer * plane;
  geometry.value_offset = geometry.key_offset + plane;
  geometry.head_stride = uint64_t{sizeof(float)} * config.attention.head_dim;
  geometry.token_stride = geometry.head_stride * config.attention.kv_heads;
  geometry.page_stride = geometry.token_stride * page_tokens;
  return geometry;
}

kernels::PagedSlots KvPages::Slots(uint64_t offset, const int32_t* page_table) const {
  const PagedLayerGeometry geometry = Geometry(0);
  kernels::PagedSlots slots;
  slots.base = reinterpret_cast<float*>(memory_ + offset);
  slots.page_stride = geometry.page_stride / sizeof(float);
  slots.token_stride = geometry.token_stride / sizeof(float);
  slots.head_stride = geometry.head_stride / sizeof(float);
  slots.page_tokens = page_tokens_;
  slots.page_table = page_table;
  return slots;
}

kernels::PagedSlots KvPages::Keys(int32_t attention_layer, const int32_t* page_table) const {
  return Slots(Geometry(attention_layer).key_offset, page_table);
}

kernels::PagedSlots KvPages::Values(int32_t attention_layer, const int32_t* page_table) const {
  return Slots(Geometry(attention_layer).value_offset, page_table);
}

}  // namespace ashlar::refengine
