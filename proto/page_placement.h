// SPDX-License-Identifier: Apache-2.0
// PlaceInPages: the place of a segment in pages that many requests share in place (MEPIC §3.2.1, §3.3.1).
#pragma once

#include <cstdint>

#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

// Places a segment in whole pages, so that its tokens lie in the same slots in every request: token i is at slot
// first_slot + i of the segment's pages. A segment is padded before its first token. A prefix (kCheckpoint) begins at
// position 0 in every request and is padded after its last token. Padding adds slots, never positions.
//
// The pages that hold interior tokens, [head, tokens − tail), are shared. Each request recomputes the seams, and with
// them MEPIC's first page, in pages of its own.
//
// Keys in shared pages are unrotated if the layout says so. Otherwise the key of token i is rotated by first_slot + i.
// Neither depends on the request.
struct PagePlacement {
  uint64_t first_slot = 0;    // slot of token 0; less than page_tokens
  uint64_t first_page = 0;    // index of the first shared page among the segment's pages
  uint64_t shared_pages = 0;  // 0 without an interior
  uint64_t first_token = 0;   // the tokens that are read from the shared pages:
  uint64_t end_token = 0;     // [first_token, end_token)
};

// Places a segment or checkpoint. `tokens` is at most limits::kMaxPromptTokens, `page_tokens` at least 1.
PagePlacement PlaceInPages(const Layout& layout, ObjectKind kind, uint64_t tokens, uint32_t page_tokens);

}  // namespace ashlar
