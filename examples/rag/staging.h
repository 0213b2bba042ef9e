// SPDX-License-Identifier: Apache-2.0
// The engine's memory as the cache sees it: where pages lie, and tensors of linear layers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ashlar/engine.h"
#include "client/session/client.h"
#include "examples/refengine/engine.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// Room for so many pages.
size_t RegionBytes(const refengine::ModelConfig& config, int32_t page_tokens, int32_t pages);

// How the pages lie that a region begins with.
PagedCache DeclaredPages(const refengine::ModelConfig& config, const refengine::KvPages& pool);
std::vector<engine::PagePlace> PlacesOf(const refengine::ModelConfig& config, int32_t page_tokens, int32_t pages);

// Where the tensors of a state lie, all linear layers'. Until the state moves.
std::vector<engine::LinearTensors> TensorsOf(const refengine::ModelConfig& config,
                                             const refengine::RecurrentState& state);

// Room for one tuple of all linear layers.
class TupleRoom {
 public:
  explicit TupleRoom(const refengine::ModelConfig& config);

  std::span<const refengine::TupleBuffers> buffers() const { return buffers_; }  // one a linear layer
  std::vector<engine::LinearTensors> Tensors() const;

 private:
  std::vector<std::vector<float>> memory_;
  std::vector<refengine::TupleBuffers> buffers_;
  std::vector<uint32_t> layers_;  // of these, among all of the model
};

}  // namespace ashlar::rag
