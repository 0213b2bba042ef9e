// SPDX-License-Identifier: Apache-2.0
// One running text: its pages, and the state of every linear layer behind its last token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/refengine/config.h"
#include "examples/refengine/kv_pages.h"

namespace ashlar::refengine {

// States and convolution windows of all linear layers at one position. A value: copy it to take a snapshot.
// Linear layers are counted by themselves: 0 … config.linear_layers() − 1.
class RecurrentState {
 public:
  RecurrentState() = default;
  explicit RecurrentState(const ModelConfig& config);  // all zero: position 0

  // [value_heads, d_k, d_v]
  std::span<float> State(int32_t linear_layer);
  std::span<const float> State(int32_t linear_layer) const;
  // [conv_kernel − 1, conv_channels]: pre-convolution inputs of the last tokens, oldest first
  std::span<float> ConvWindow(int32_t linear_layer);
  std::span<const float> ConvWindow(int32_t linear_layer) const;

 private:
  size_t state_floats_ = 0, window_floats_ = 0;  // floats per layer
  std::vector<float> data_;
};

// Cached keys and values of a run of positions that stand in pages which other sequences read, too, and nobody turns:
// the key at position + i stands at slot first_slot + i of its own page table, turned by position + i − origin.
struct SharedSpan {
  int64_t position = 0, tokens = 0;
  std::vector<int32_t> page_table;
  int64_t first_slot = 0;
  int64_t origin = 0;
};

class DecodeBuffers;

class Sequence {
 public:
  // `pool` outlives the sequence.
  Sequence(const ModelConfig& config, KvPages& pool);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  int64_t length() const { return length_; }
  // Page of position p: page_table()[p / page_tokens]. Stays in place while no more than the reserved tokens are used.
  const std::vector<int32_t>& page_table() const { return page_table_; }
  KvPages& pool() const { return *pool_; }
  // Aborts where tokens wait in buffers: settle the sequence first (Engine::Settle).
  const RecurrentState& recurrent() const;
  // Tokens that wait in buffers (EngineOptions::decoding): the states do not hold them yet.
  int32_t buffered() const;

  // Takes pages for positions [0, tokens), so that cached keys and values can be landed there before Advance reaches
  // them. False, and nothing is taken, when the pool has too few.
  bool Reserve(int64_t tokens);

  // Uses pages that somebody else allocates instead, for good: `page_table` for what is computed, −1 where all
  // positions of a page lie in `shared`, which ascends. The sequence must be empty.
  void Place(std::vector<int32_t> page_table, std::vector<SharedSpan> shared);
  const std::vector<SharedSpan>& shared() const { return shared_; }

  // Goes back to an earlier position of this same text; pages stay reserved.
  void Rewind(int64_t length, const RecurrentState& recurrent);

  // Leaves its pages, so many, to somebody who gives them back to the pool later.
  uint64_t Surrender();

  // Back to position 0; pages that came from the pool return there.
  void Clear();

 private:
  friend class Engine;
  KvPages* pool_;
  RecurrentState zero_, recurrent_;
  std::unique_ptr<DecodeBuffers> buffers_;  // null: none was needed yet
  std::vector<int32_t> page_table_;
  std::vector<SharedSpan> shared_;
  bool placed_ = false;  // the pages are not the pool's to give
  int64_t length_ = 0;
};

}  // namespace ashlar::refengine
