// SPDX-License-Identifier: Apache-2.0
// One running text: its pages, and the state of every linear layer after its last token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/refengine/config.h"
#include "examples/refengine/kv_pages.h"

namespace ashlar::refengine {

// States and convolution windows of all linear layers at one position. A value: copy it to take a snapshot. Linear
// layers are numbered separately: 0 … config.linear_layers() − 1.
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

// Cached keys and values of a run of positions in pages that other sequences also read, and that are never rotated: the
// key at position + i is at slot first_slot + i of its own page table, rotated by position + i − origin.
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
  // Page of position p: page_table()[p / page_tokens]. Not reallocated while only the reserved tokens are used.
  const std::vector<int32_t>& page_table() const { return page_table_; }
  KvPages& pool() const { return *pool_; }
  // Aborts where tokens wait in buffers: settle the sequence first (Engine::Settle).
  const RecurrentState& recurrent() const;
  // Tokens that wait in buffers (EngineOptions::decoding): the states do not include them yet.
  int32_t buffered() const;

  // Takes pages for positions [0, tokens), so that cached keys and values can land there before Advance reaches them.
  // Returns false, taking nothing, if the pool has too few.
  bool Reserve(int64_t tokens);

  // Permanently uses pages that the caller allocates instead: `page_table` for computed positions, −1 where all
  // positions of a page are in `shared`, which ascends. The sequence must be empty.
  void Place(std::vector<int32_t> page_table, std::vector<SharedSpan> shared);
  const std::vector<SharedSpan>& shared() const { return shared_; }

  // Goes back to an earlier position of this text; pages stay reserved.
  void Rewind(int64_t length, const RecurrentState& recurrent);

  // Hands its pages to the caller, which must return them to the pool. Returns their number.
  uint64_t Surrender();

  // Back to position 0; pages from the pool return to it.
  void Clear();

 private:
  friend class Engine;
  KvPages* pool_;
  RecurrentState zero_, recurrent_;
  std::unique_ptr<DecodeBuffers> buffers_;  // null: not needed yet
  std::vector<int32_t> page_table_;
  std::vector<SharedSpan> shared_;
  bool placed_ = false;  // the pages do not belong to the pool
  int64_t length_ = 0;
};

}  // namespace ashlar::refengine
