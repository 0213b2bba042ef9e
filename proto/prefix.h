// SPDX-License-Identifier: Apache-2.0
// Objects of an exact prefix. Keys and values are stored in blocks, states in checkpoints.
//
// A *block* (kPrefixBlock) has the keys and values of a fixed number of tokens, starts at a multiple of that number,
// and has no states. Prefixes with the same beginning share blocks.
//
// A *checkpoint* (kCheckpoint) has the states of all linear layers at one depth, and the keys and values after the last
// whole block before it, so that a prompt can resume at the exact token. Blocks and checkpoints are published and
// landed with the first token of the text at position 0: keys keep their rotation.
//
// A *span* (kSpan, KVBuffer §6) follows a checkpoint. It has the inputs of the recurrence and the keys and values of
// the tokens after that checkpoint. The engine rebuilds the state at any depth in the span, so a span can replace the
// state at its end if it takes fewer bytes.
//
// The headers are planned by PlanPrefixBlock, PlanPrefixCheckpoint and PlanPrefixSpan (proto/object.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

// Names a conversation; all zero means none. Engines draw it at random. A prompt of the same namespace with the same id
// may resume from the conversation's states.
using ConversationId = std::array<uint8_t, 16>;

// Returns the tokens per block: whole pages of the layout, at least limits::kPrefixBlockTokens.
uint32_t PrefixBlockTokens(const Layout& layout);

// Keys of the prefix objects of one text (docs/formats.md, "Keys of prefixes"). Keys are chained: the key of a block
// depends on the block before it, and so on all tokens before it. A prefix after a landed interior is private to a
// conversation: its chain starts with the conversation id, so that no other conversation finds it.
class PrefixKeys {
 public:
  // Hashes all whole blocks. `ns` must be the result of Salted if the text has a salt. `tokens` and `media`, with
  // offsets from the start of the text, must outlive the object.
  PrefixKeys(const NamespaceId& ns, uint32_t block_tokens, std::span<const int32_t> tokens,
             const ConversationId& conversation = {}, std::span<const MediaHash> media = {});

  uint32_t block_tokens() const { return block_tokens_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const Key> blocks() const { return blocks_; }
  // Returns an id that is equal for all texts that begin with the same block; 0 without a whole block. Objects of a
  // group are used together.
  uint64_t Group() const;
  // 1 ≤ depth ≤ tokens. Hashes the tokens after the last whole block.
  Key Checkpoint(uint64_t depth) const;
  // Returns the key of the span [begin, end), which follows the checkpoint at `begin`. begin ≥ 1, end ≤ tokens.
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
