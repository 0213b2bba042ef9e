// The engine's memory as the daemon sees it: pages, and behind them room for the tuples that are published.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ashlar/client.h"
#include "examples/refengine/engine.h"
#include "examples/refengine/page_pool.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// Room for so many pages and, behind them, so many tuples of all linear layers; a checkpoint takes the room of one.
size_t RegionBytes(const refengine::ModelConfig& config, int32_t page_tokens, int32_t pages, size_t tuples = 1);

// Returns the layout of the pages with which a region begins.
PagedCache DeclaredPages(const refengine::ModelConfig& config, const refengine::PagePool& pool);

// The room of one tuple.
class Staging {
 public:
  // In a region of RegionBytes for more than `tuple` tuples.
  Staging(const refengine::ModelConfig& config, const refengine::PagePool& pool, const Region& region, size_t tuple);

  std::span<const refengine::TupleBuffers> buffers() const { return buffers_; }  // one a linear layer
  void Take(const refengine::RecurrentState& state);
  // States and convolution tails, of all linear layers.
  std::vector<PublishParts::Linear> Parts() const;

 private:
  std::vector<refengine::TupleBuffers> buffers_;
  std::vector<uint32_t> layers_;  // of these, among all of the model
};

}  // namespace ashlar::rag
