// Identity and Layout: an engine's declaration when it opens a model. Identity names the model, Layout is the exact
// shape of its cached state. Both enter the namespace through our own canonical encoding; nothing is shared across
// namespaces. Beside them, outside the namespace: the engine's shard and its cost model (proto/ashlar/v1/cache.proto).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Numbers are part of the canonical encoding and of the object format: never reuse one.
enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3, kF8E4M3 = 4, kF8E5M2 = 5 };
uint32_t ElementBytes(DType dtype);

enum class AttentionKind : uint8_t { kGqa = 1, kMla = 2 };
enum class RopeKind : uint8_t { kNone = 0, kHalfSplit = 1, kInterleaved = 2 };
enum class StoredKeys : uint8_t { kZeroBased = 1, kUnrotated = 2 };
enum class LinearFamily : uint8_t {
  kRetnet = 1,
  kLightning = 2,
  kMamba2 = 3,
  kMamba1 = 4,
  kGla = 5,
  kDeltanet = 6,
  kGdn = 7,
  kKda = 8
};
// The first four: what a layer's transitions are. Behind them: what single heads of a dense layer may be stored as
// (object.h); no layout declares these.
enum class TransitionKind : uint8_t {
  kScalar = 1,
  kDiagonal = 2,
  kDense = 3,
  kElementwise = 4,
  kLowRank = 5,
  kZero = 6
};
enum class StateOrderKind : uint8_t { kKeyFirst = 1, kValueFirst = 2 };

struct Rope {
  RopeKind kind = RopeKind::kNone;
  uint32_t rotary_dim = 0;          // even, ≤ the key's dimension
  double scale = 1.0;               // YaRN's attention scale, applied once per side
  std::vector<double> frequencies;  // [rotary_dim / 2], radians per position; the engine's own numbers
  bool operator==(const Rope&) const = default;
};

struct AttentionLayer {
  AttentionKind kind = AttentionKind::kGqa;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;    // gqa; mla: the latent's dimension
  uint32_t value_dim = 0;  // gqa; mla: the rotary key part's dimension
  DType dtype = DType::kF32;
  bool scales = false;  // fp8: one fp32 scale per token and head follows
  Rope rope;
  StoredKeys stored = StoredKeys::kZeroBased;
  bool operator==(const AttentionLayer&) const = default;
};

struct LinearLayer {
  LinearFamily family = LinearFamily::kGdn;
  uint32_t key_heads = 0;
  uint32_t value_heads = 0;
  uint32_t d_k = 0;
  uint32_t d_v = 0;
  // Numbers a family needs besides its tokens. retnet, lightning: each head's decay, mamba2: each head's A, all
  // [value_heads]; mamba1: A, [value_heads, d_k, d_v]; the others: none.
  std::vector<float> decay_table;
  DType state_dtype = DType::kF32;
  TransitionKind transition = TransitionKind::kDense;
  StateOrderKind order = StateOrderKind::kKeyFirst;
  uint32_t conv_channels = 0;  // 0: no short convolution
  uint32_t conv_kernel = 0;    // its width; the cached tail holds conv_kernel − 1 tokens' inputs
  Rope rope;                   // on keys inside the layer; scalar transitions only: R(p) commutes with no others
  bool operator==(const LinearLayer&) const = default;
};

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
