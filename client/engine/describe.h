// SPDX-License-Identifier: Apache-2.0
// Converts the engine's plain structs to the arguments of the client's calls.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "client/session/client.h"

namespace ashlar::engine {

struct DescribedModel {
  Identity identity;
  ashlar::Layout layout;  // layout of the whole model
  Shard shard;
  CostModel cost;
};

// Only reads the fields and follows the pointers. INVALID_ARGUMENT: "model.layers[3].decay_table: null". OpenModel
// checks the values.
absl::StatusOr<DescribedModel> Describe(const Model& model);

// Copies the media of a text of `tokens` tokens. INVALID_ARGUMENT begins with `field`.
absl::StatusOr<std::vector<MediaHash>> DescribeMedia(const Media* media, uint64_t count, uint64_t tokens,
                                                     const std::string& field);

// Digests the salt of a prompt or a text. INVALID_ARGUMENT begins with `field`.
absl::StatusOr<Salt> DescribeSalt(const void* salt, uint64_t bytes, const std::string& field);

// Renames errors of layout and identity: their prefixes "layout." and "identity." become "model.", because this API has
// both in one struct.
absl::Status NameModel(const absl::Status& status);

// Returns each layer's group; empty without groups. INVALID_ARGUMENT unless each attention layer is in one of them.
absl::StatusOr<std::vector<uint32_t>> GroupsOf(const Memory& memory, const ashlar::Layout& shard);

// Reads the engine's groups and the places that it chose. INVALID_ARGUMENT if pointer and count disagree, or a group
// has no pages.
absl::StatusOr<PagedCache> Describe(const Memory& memory, uint32_t page_tokens, const std::vector<uint32_t>& group_of);

// Places the pages of a shard's attention layers in `pages`, and returns their size in bytes: keys and values of one
// layer's pages, then its scales, after those of the previous layer. Common pages begin at the same address: one page
// holds all layers of a group, and is large enough for any group. 0 without attention.
absl::StatusOr<uint64_t> PlacePages(const ashlar::Layout& shard, const std::vector<uint32_t>& group_of,
                                    PagedCache& pages);

PagePlace ToPlace(const PagedLayer& layer);

}  // namespace ashlar::engine
