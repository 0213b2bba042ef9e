// SPDX-License-Identifier: Apache-2.0
// The engine's memory that the cache uses: pages, and tensors of linear layers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ashlar/engine.h"
#include "examples/refengine/engine.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// The places of pages in the memory of a pool with this many pages.
std::vector<engine::PagePlace> PlacesOf(const refengine::ModelConfig& config, int32_t page_tokens, int32_t pages);

// The places of a state's tensors in all linear layers. Valid until the state moves.
std::vector<engine::LinearTensors> TensorsOf(const refengine::ModelConfig& config,
                                             const refengine::RecurrentState& state);

// The tuples of one step that is taken from the cache, in the kernels' form. Valid until the request ends or its plan
// changes.
struct StepTuples {
  explicit StepTuples(const refengine::ModelConfig& config)
      : layers(static_cast<size_t>(config.layers())), heads(static_cast<size_t>(config.layers())) {}

  std::vector<refengine::CachedLayer> layers;          // indexed by layer; empty for attention layers
  std::vector<std::vector<kernels::HeadTuple>> heads;  // indexed by layer; `layers` points to them
};
// Waits for a layer of the plan, and reads the tuples of all its steps if it is a linear layer; `steps` has one element
// for each step. False: a hit failed to land.
bool ReadLayer(engine::Request& request, const refengine::ModelConfig& config, int32_t layer,
               std::vector<StepTuples>& steps);

// Memory for one tuple of all linear layers.
class TupleMemory {
 public:
  explicit TupleMemory(const refengine::ModelConfig& config);

  std::span<const refengine::TupleBuffers> buffers() const { return buffers_; }  // one per linear layer
  std::vector<engine::LinearTensors> Tensors() const;

 private:
  std::vector<std::vector<float>> memory_;
  std::vector<refengine::TupleBuffers> buffers_;
  std::vector<uint32_t> layers_;  // index in the model of each linear layer
};

}  // namespace ashlar::rag
