// SPDX-License-Identifier: Apache-2.0
// Identity and Layout: an engine's declaration when it opens a model. Identity names the model, Layout is the exact
// shape of its cached state. Both enter the namespace through our own canonical encoding; nothing is shared across
// namespaces. Beside them, outside the namespace: the engine's shard and its cost model (proto/ashlar/v1/cache.proto).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tensor/layer.h"

namespace ashlar {

using Layer = std::variant<AttentionLayer, LinearLayer>;

struct Layout {
  uint32_t page_tokens = 0;
  uint32_t head = 0;  // seam widths: a segment of n tokens has the interior [head, n − tail)
  uint32_t tail = 0;
  std::vector<Layer> layers;
  bool operator==(const Layout&) const = default;
};

struct Identity {
  std::string model_id;
  std::string weights_digest;  // of the weights as loaded; never empty
  std::string dtype;           // and quantisation, as the engine names them
  std::string quantization;
  std::string tokenizer_digest;
  std::string lora;  // digest of the adapter, empty for none
  bool operator==(const Identity&) const = default;
};

// INVALID_ARGUMENT naming the field ("layout.layers[3].d_k: …") for anything that makes no sense: zero sizes, a head
// narrower than the convolution, RoPE in a non-scalar linear layer, a transition that the family does not have, a unit
// larger than an extent, sizes that overflow.
absl::Status Validate(const Layout& layout);
absl::Status Validate(const Identity& identity);

// Canonical encoding (docs/formats.md): fixed order, little endian, length-prefixed, versioned. Decode accepts exactly
// the bytes that Encode produces and refuses everything else by name.
std::string EncodeLayout(const Layout& layout);
std::string EncodeIdentity(const Identity& identity);
absl::StatusOr<Layout> DecodeLayout(absl::string_view bytes);
absl::StatusOr<Identity> DecodeIdentity(absl::string_view bytes);

}  // namespace ashlar
