// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/sequence.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "examples/refengine/decode_buffers.h"

namespace ashlar::refengine {

RecurrentState::RecurrentState(const ModelConfig& config)
    : state_floats_(size_t(config.linear.value_heads) * config.linear.d_k * config.linear.d_v),
      window_floats_(size_t(config.linear.conv_kernel - 1) * config.linear.conv_channels()),
      data_(config.linear_layers() * (state_floats_ + window_floats_)) {}

std::span<float> RecurrentState::State(int32_t linear_layer) {
  return {data_.data() + linear_layer * (state_floats_ + window_floats_), state_floats_};
}
std::span<const float> RecurrentState::State(int32_t linear_layer) const {
  return {data_.data() + linear_layer * (state_floats_ + window_floats_), state_floats_};
}
std::span<float> RecurrentState::ConvWindow(int32_t linear_layer) {
  return {State(linear_layer).data() + state_floats_, window_floats_};
}
std::span<const float> RecurrentState::ConvWindow(int32_t linear_layer) const {
  return {State(linear_layer).data() + state_floats_, window_floats_};
}

Sequence::Sequence(const ModelConfig& config, KvPages& pool) : pool_(&pool), zero_(config), recurrent_(zero_) {}

Sequence::~Sequence() {
  Clear();
}

const RecurrentState& Sequence::recurrent() const {
  if (buffered() > 0) {
    std::fprintf(stderr, "refengine: the sequence is not settled: %d tokens wait in buffers\n", buffered());
    std::abort();
  }
  return recurrent_;
}

int32_t Sequence::buffered() const {
  return buffers_ == nullptr ? 0 : buffers_->filled();
}

bool Sequence::Reserve(int64_t tokens) {
  const int64_t pages = (tokens + pool_->page_tokens() - 1) / pool_->page_tokens();
  if (placed_) return pages <= static_cast<int64_t>(page_table_.size());
  if (pages - static_cast<int64_t>(page_table_.size()) > pool_->free_pages()) return false;
  while (static_cast<int64_t>(page_table_.size()) < pages) page_table_.push_back(*pool_->Allocate());
  return true;
}

void Sequence::Place(std::vector<int32_t> page_table, std::vector<SharedSpan> shared) {
  Clear();
  placed_ = true;
  page_table_ = std::move(page_table);
  shared_ = std::move(shared);
}

void Sequence::Rewind(int64_t length, const RecurrentState& recurrent) {
  length_ = length;
  recurrent_ = recurrent;
  if (buffers_ != nullptr) buffers_->Erase();
}

uint64_t Sequence::Surrender() {
  const uint64_t pages = page_table_.size();
  page_table_.clear();
  Clear();
  return pages;
}

void Sequence::Clear() {
  if (!placed_) {
    for (const int32_t page : page_table_) pool_->Free(page);
    page_table_.clear();
  }
  recurrent_ = zero_;
  if (buffers_ != nullptr) buffers_->Erase();
  length_ = 0;
}

}  // namespace ashlar::refengine
