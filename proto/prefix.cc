#include "proto/prefix.h"

#include "proto/limits.h"

namespace ashlar {

uint32_t PrefixBlockTokens(const Layout& layout) {
  const uint32_t pages = (limits::kPrefixBlockTokens + layout.page_tokens - 1) / layout.page_tokens;
  return pages * layout.page_tokens;
}

PrefixKeys::PrefixKeys(const NamespaceId& ns, uint32_t block_tokens, std::span<const int32_t> tokens,
                       const ConversationId& conversation)
    : ns_(ns), block_tokens_(block_tokens), tokens_(tokens) {
  if (conversation != ConversationId{}) root_ = MakeChainRoot(ns, conversation);
  blocks_.reserve(tokens.size() / block_tokens);
  const Digest* before = &root_;
  for (size_t end = block_tokens; end <= tokens.size(); end += block_tokens) {
    const auto block = tokens.subspan(end - block_tokens, block_tokens);
    before = &blocks_.emplace_back(MakeChainedKey(ns, ObjectKind::kPrefixPage, *before, block));
  }
}

Key PrefixKeys::Checkpoint(uint64_t depth) const {
  const uint64_t whole = depth / block_tokens_;
  const Digest& before = whole == 0 ? root_ : blocks_[whole - 1];
  const auto tail = tokens_.subspan(whole * block_tokens_, depth - whole * block_tokens_);
  return MakeChainedKey(ns_, ObjectKind::kCheckpoint, before, tail);
}

Key PrefixKeys::Span(uint64_t begin, uint64_t end) const {
  return MakeChainedKey(ns_, ObjectKind::kSpan, Checkpoint(begin), tokens_.subspan(begin, end - begin));
}

}  // namespace ashlar
