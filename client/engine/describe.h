// Converts the engine's plain structs to the arguments of the client's calls.
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

// Reads what the pointers name, no more. INVALID_ARGUMENT: "model.layers[3].decay_table: null". OpenModel refuses other
// invalid values.
absl::StatusOr<DescribedModel> Describe(const Model& model);

// Copies what names the inputs of a text of `tokens` tokens. INVALID_ARGUMENT begins with `field`.
absl::StatusOr<std::vector<MediaHash>> DescribeMedia(const Media* media, uint64_t count, uint64_t tokens,
                                                     const std::string& field);

// Renames errors of layout and identity, which begin with "layout." or "identity.", to "model.", as this API names
// both.
absl::Status NameModel(const absl::Status& status);

// Reads the engine's own places. INVALID_ARGUMENT if pointer and count disagree.
absl::StatusOr<PagedCache> Describe(const Memory& memory, uint32_t page_tokens);

// Places the pages of a shard's attention layers one behind the other: keys of all pages, then values, then scales.
// `bytes`: the bytes that they take; 0 without attention.
struct PlacedPages {
  PagedCache pages;
  uint64_t bytes = 0;
};
absl::StatusOr<PlacedPages> PlacePages(const ashlar::Layout& shard, uint32_t pages);

PagePlace ToPlace(const PagedLayer& layer);

}  // namespace ashlar::engine
