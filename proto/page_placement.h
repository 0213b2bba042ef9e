// SPDX-License-Identifier: Apache-2.0
// PlaceInPages: the place of a segment in pages that many requests share in place (MEPIC §3.2.1, §3.3.1).
#pragma once

#include <cstdint>

#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

// A segment is padded in front to whole pages, so that its bytes lie on the same slots in every request: token i stands
// at slot first_slot + i of the segment's pages. A prefix (kCheckpoint) begins at position 0 in every request: it is
// padded behind. Padding is in pages only, never in positions.
//
// The segment's pages that hold interior tokens, [head, tokens − tail), are shared. Tokens that each request computes
// again, the seams and with them MEPIC's first page, stand in pages of the request's own.
//
// Keys in shared pages are unrotated if the layout says so; else token i's key is turned by first_slot + i. Neither
// depends on the request.
struct PagePlacement {
  uint64_t first_slot = 0;    // of token 0; below page_tokens
  uint64_t first_page = 0;    // of the segment's pages, the first that is shared
  uint64_t shared_pages = 0;  // 0: no interior
  uint64_t first_token = 0;   // the tokens whose keys and values are read there:
  uint64_t end_token = 0;     // [first_token, end_token)
};

// Places a segment or checkpoint of `tokens` tokens, at most limits::kMaxPromptTokens, in pages of `page_tokens`, 1 or
// more.
PagePlacement PlaceInPages(const Layout& layout, ObjectKind kind, uint64_t tokens, uint32_t page_tokens);

}  // namespace ashlar
