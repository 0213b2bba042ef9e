// SPDX-License-Identifier: Apache-2.0
#include "proto/page_placement.h"

namespace ashlar {

PagePlacement PlaceInPages(const Layout& layout, ObjectKind kind, uint64_t tokens, uint32_t page_tokens) {
  PagePlacement placement;
  placement.end_token = tokens;
  if (kind != ObjectKind::kCheckpoint) {
    if (tokens <= uint64_t{layout.head} + layout.tail) return {};
    placement.first_slot = (page_tokens - tokens % page_tokens) % page_tokens;
    placement.first_token = layout.head;
    placement.end_token = tokens - layout.tail;
  }
  if (placement.first_token == placement.end_token) return {};
  placement.first_page = (placement.first_slot + placement.first_token) / page_tokens;
  const uint64_t last_page = (placement.first_slot + placement.end_token - 1) / page_tokens;
  placement.shared_pages = last_page + 1 - placement.first_page;
  return placement;
}

}  // namespace ashlar
