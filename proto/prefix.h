// SPDX-License-Identifier: Apache-2.0
// The storage of an exact prefix: its keys and values in blocks, its states in checkpoints, each an object of its own.
//
// A *block* (kPrefixBlock) has the keys and values of one run of tokens at a multiple of a fixed length, and no states:
// a prefix shares the blocks of all longer ones. A *checkpoint* (kCheckpoint) has the states of all linear layers at
// one depth, and the keys and values behind the last whole block before it, so that a prompt resumes at the exact
// token. Both are published and landed with the text's first token at position 0: rows keep their positions, and no key
// is turned. A *span* (kSpan, KVBuffer §6) hangs on a checkpoint: it has the inputs of the recurrence for the tokens
// behind the checkpoint, and their keys and values, whole blocks or not. The engine rebuilds the state at each of its
// depths from it, so a span can replace the state at its end if it takes less. Their headers: PlanPrefixBlock,
// PlanPrefixCheckpoint and PlanPrefixSpan (proto/object.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

// Names a conversation; all zero: none. A prompt of the same namespace that knows it may resume from its states:
// engines draw it at random.
using ConversationId = std::array<uint8_t, 16>;

// Tokens of a block: whole pages of the layout, at least limits::kPrefixBlockTokens.
uint32_t PrefixBlockTokens(const Layout& layout);

// Keys of the objects of one text's prefixes (docs/formats.md, "Keys of prefixes"). They are chained: a block's key
// binds the block before it, and so all tokens before it, and is hashed once whatever follows. A prefix behind a landed
// interior is a conversation's own: its chain begins with the conversation, and nobody else finds it.
class PrefixKeys {
 public:
  // Hashes all whole blocks; `ns` is Salted where the text has a salt. `tokens` and `media`, counted from the text's
  // start, must outlive the object.
  PrefixKeys(const NamespaceId& ns, uint32_t block_tokens, std::span<const int32_t> tokens,
             const ConversationId& conversation = {}, std::span<const MediaHash> media = {});

  uint32_t block_tokens() const { return block_tokens_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const Key> blocks() const { return blocks_; }
  // The same for all texts that begin with the same block; 0: the text has no whole block. Says which objects are of
  // use together.
  uint64_t Group() const;
  // 1 ≤ depth ≤ tokens. Hashes what is behind the last whole block.
  Key Checkpoint(uint64_t depth) const;
  // Returns the key of the span [begin, end), behind the checkpoint at `begin` ≥ 1. end ≤ tokens.
  Key Span(uint64_t begin, uint64_t end) const;

 private:
  Key Chained(ObjectKind kind, const Digest& before, uint64_t begin, uint64_t end) const;

  NamespaceId ns_;
  uint32_t block_tokens_;
  std::span<const int32_t> tokens_;
  std::span<const MediaHash> media_;
  Digest root_{};
  std::vector<Key> blocks_;
};

}  // namespace ashlar
