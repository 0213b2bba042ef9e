// SPDX-License-Identifier: Apache-2.0
// Identity and Layout: what an engine declares when it opens a model. Identity names the model; Layout is the exact
// shape of its cached state. Both are part of the namespace through the canonical encoding, and nothing is shared
// across namespaces. The engine's shard and its cost model (proto/ashlar/v1/cache.proto) are not part of the namespace.
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

using Layer = std::variant<AttentionLayer, LinearLayer, OpaqueLayer>;

// Returns whether the layer keeps rows per token in an engine's pages, and whether it keeps a state.
inline bool HasRows(const Layer& layer) {
  const auto* const opaque = std::get_if<OpaqueLayer>(&layer);
  return opaque != nullptr ? opaque->token_bytes > 0 : std::holds_alternative<AttentionLayer>(layer);
}
inline bool HasState(const Layer& layer) {
  const auto* const opaque = std::get_if<OpaqueLayer>(&layer);
  return opaque != nullptr ? opaque->state_bytes > 0 : std::holds_alternative<LinearLayer>(layer);
}

struct Layout {
  uint32_t page_tokens = 0;
  uint32_t head = 0;  // seam widths: a segment of n tokens has the interior [head, n − tail)
  uint32_t tail = 0;
  std::vector<Layer> layers;
  bool operator==(const Layout&) const = default;
};

struct Identity {
  std::string model_id;
  std::string weights_digest;  // digest of the weights as loaded; never empty
  std::string dtype;           // dtype and quantisation, as the engine names them
  std::string quantization;
  std::string tokenizer_digest;
  std::string lora;  // digest of the adapter; empty without one
  bool operator==(const Identity&) const = default;
};

// Returns INVALID_ARGUMENT with the field's name ("layout.layers[3].d_k: …") for an invalid layout: zero sizes, a head
// seam narrower than the convolution, RoPE in a non-scalar linear layer, a transition that the family does not have, a
// unit larger than an extent, sizes that overflow.
absl::Status Validate(const Layout& layout);
// Returns FAILED_PRECONDITION with the name of the first opaque layer: its model has exact prefixes but no segments.
absl::Status CheckComposable(const Layout& layout);
absl::Status Validate(const Identity& identity);

// The canonical encoding (docs/formats.md): fixed order, little endian, length-prefixed, versioned. Decode accepts
// exactly the bytes that Encode produces. For all others it returns an error with the field's name.
std::string EncodeLayout(const Layout& layout);
std::string EncodeIdentity(const Identity& identity);
absl::StatusOr<Layout> DecodeLayout(absl::string_view bytes);
absl::StatusOr<Identity> DecodeIdentity(absl::string_view bytes);

}  // namespace ashlar
