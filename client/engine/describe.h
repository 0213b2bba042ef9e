// The engine's plain structs, as the client's calls take them.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ashlar/client.h"
#include "ashlar/engine.h"

namespace ashlar::engine {

struct DescribedModel {
  Identity identity;
  ashlar::Layout layout;  // of the whole model
  Shard shard;
  CostModel cost;
};

// Reads what the pointers name, no more. INVALID_ARGUMENT: "model.layers[3].decay_table: null". What else makes no
// sense is left to OpenModel.
absl::StatusOr<DescribedModel> Describe(const Model& model);

// Errors of the layout begin with "layout."; of this API that is "model.".
absl::Status NameModel(const absl::Status& status);

// The engine's own places. INVALID_ARGUMENT where pointer and count disagree.
absl::StatusOr<PagedCache> Describe(const Memory& memory, uint32_t page_tokens);

// Pages of a shard's attention layers one behind the other: keys of all pages, then values, then scales. `bytes`: what
// they take; 0 without attention.
struct PlacedPages {
  PagedCache pages;
  uint64_t bytes = 0;
};
absl::StatusOr<PlacedPages> PlacePages(const ashlar::Layout& shard, uint32_t pages);

PagePlace ToPlace(const PagedLayer& layer);

}  // namespace ashlar::engine
