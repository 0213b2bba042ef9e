// SPDX-License-Identifier: Apache-2.0
#include "proto/prefix.h"

#include <cstring>

#include "proto/limits.h"

namespace ashlar {

uint32_t PrefixBlockTokens(const Layout& layout) {
  const uint32_t pages = (limits::kPrefixBlockTokens + layout.page_tokens - 1) / layout.page_tokens;
  return pages * layout.page_tokens;
}

PrefixKeys::PrefixKeys(const NamespaceId& ns, uint32_t block_tokens, std::span<const int32_t> tokens,
                       const ConversationId& conversation, std::span<const MediaHash> media)
    : ns_(ns), block_tokens_(block_tokens), tokens_(tokens), media_(media) {
  if (conversation != ConversationId{}) root_ = MakeChainRoot(ns, conversation);
  blocks_.reserve(tokens.size() / block_tokens);
  const Digest* before = &root_;
  for (size_t end = block_tokens; end <= tokens.size(); end += block_tokens) {
    before = &blocks_.emplace_back(Chained(ObjectKind::kPrefixBlock, *before, end - block_tokens, end));
  }
}

uint64_t PrefixKeys::Group() const {
  uint64_t group = 0;
  if (!blocks_.empty()) std::memcpy(&group, blocks_.front().bytes.data(), sizeof group);
  return group;
}

Key PrefixKeys::Checkpoint(uint64_t depth) const {
  const uint64_t whole = depth / block_tokens_;
  const Digest& before = whole == 0 ? root_ : blocks_[whole - 1];
  return Chained(ObjectKind::kCheckpoint, before, whole * block_tokens_, depth);
}

Key PrefixKeys::Span(uint64_t begin, uint64_t end) const {
  return Chained(ObjectKind::kSpan, Checkpoint(begin), begin, end);
}

Key PrefixKeys::Chained(ObjectKind kind, const Digest& before, uint64_t begin, uint64_t end) const {
  return MakeChainedKey(ns_, kind, before, tokens_.subspan(begin, end - begin), MediaWithin(media_, begin, end));
}

}  // namespace ashlar
