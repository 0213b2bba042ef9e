// SPDX-License-Identifier: Apache-2.0
#include "proto/layout.h"

#include <bit>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

absl::Status Refuse(const std::string& field, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", why));
}

absl::Status CheckRange(const std::string& field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Refuse(field, absl::StrCat(value, " is out of range; expected ", min, " to ", max));
}

// The value is none of an enumeration's.
template <typename Enum>
absl::Status RefuseUnknown(const std::string& field, Enum value, absl::string_view expected) {
  return Refuse(field, absl::StrCat(static_cast<int>(value), " is unknown; expected ", expected));
}

absl::Status CheckDType(const std::string& field, DType dtype) {
  if (ElementBytes(dtype) != 0) return absl::OkStatus();
  return RefuseUnknown(field, dtype, "1 to 5");
}

// Returns the first error. All checks are cheap, so all run. The caller lists the fields in the order of the struct.
absl::Status First(std::initializer_list<absl::Status> checks) {
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  return absl::OkStatus();
}

bool IsFp8(DType dtype) {
  return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2;
}

// `dim`: dimension of the rotated vectors.
absl::Status CheckRope(const std::string& field, const Rope& rope, uint32_t dim) {
  switch (rope.kind) {
    case RopeStyle::kNone:
      // "None" has only one form, so it has one encoding.
      if (rope.rotary_dim != 0) return Refuse(field + ".rotary_dim", "must be 0 without RoPE");
      if (rope.scale != 1.0) return Refuse(field + ".scale", "must be 1 without RoPE");
      if (!rope.frequencies.empty()) return Refuse(field + ".frequencies", "must be empty without RoPE");
      return absl::OkStatus();
    case RopeStyle::kHalfSplit:
    case RopeStyle::kInterleaved:
      break;
    default:
      return RefuseUnknown(field + ".kind", rope.kind, "0 to 2");
  }
  if (absl::Status status = CheckRange(field + ".rotary_dim", rope.rotary_dim, 2, dim); !status.ok()) return status;
  if (rope.rotary_dim % 2 != 0)
    return Refuse(field + ".rotary_dim", absl::StrCat(rope.rotary_dim, " is odd; expected an even number"));
  if (!std::isfinite(rope.scale) || rope.scale <= 0) return Refuse(field + ".scale", "must be finite and positive");
  if (rope.frequencies.size() != rope.rotary_dim / 2) {
    return Refuse(field + ".frequencies",
                  absl::StrCat(rope.frequencies.size(), " numbers; expected rotary_dim / 2 = ", rope.rotary_dim / 2));
  }
  for (size_t i = 0; i < rope.frequencies.size(); ++i) {
    if (!std::isfinite(rope.frequencies[i]) || std::signbit(rope.frequencies[i])) {
      return Refuse(absl::StrCat(field, ".frequencies[", i, "]"), "must be finite and not negative");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckUnit(const std::string& field, uint64_t bytes) {
  if (bytes <= limits::kExtentBytes) return absl::OkStatus();
  return Refuse(field, absl::StrCat("a unit of ", bytes, " bytes is larger than an extent of ", limits::kExtentBytes));
}

absl::Status CheckAttention(const std::string& field, const AttentionLayer& layer) {
  if (layer.kind != AttentionKind::kGqa && layer.kind != AttentionKind::kMla) {
    return RefuseUnknown(field + ".kind", layer.kind, "1 or 2");
  }
  const bool mla = layer.kind == AttentionKind::kMla;
  absl::Status status = First({
      // All query heads of an mla layer share one latent.
      CheckRange(field + ".kv_heads", layer.kv_heads, 1, mla ? 1 : limits::kMaxHeads),
      CheckRange(field + ".key_dim", layer.key_dim, 1, limits::kMaxHeadDim),
      CheckRange(field + ".value_dim", layer.value_dim, 1, limits::kMaxHeadDim),
      CheckDType(field + ".dtype", layer.dtype),
  });
  if (!status.ok()) return status;
  if (layer.scales && !IsFp8(layer.dtype)) return Refuse(field + ".scales", "must be false; only fp8 has scales");
  status = CheckRope(field + ".rope", layer.rope, mla ? layer.value_dim : layer.key_dim);
  if (!status.ok()) return status;
  if (layer.stored != StoredKeys::kZeroBased && layer.stored != StoredKeys::kUnrotated) {
    return RefuseUnknown(field + ".stored", layer.stored, "1 or 2");
  }
  const uint64_t elements = uint64_t{layer.kv_heads} * ElementBytes(layer.dtype);
  return First({
      CheckUnit(field + ".key_dim", elements * layer.key_dim),
      CheckUnit(field + ".value_dim", elements * layer.value_dim),
  });
}

// Returns how many numbers a family's computation needs besides the tokens (HYPIC §4.2).
absl::StatusOr<uint64_t> DecayNumbersOf(const std::string& field, const LinearLayer& layer) {
  switch (layer.family) {
    case Family::kRetnet:
    case Family::kLightning:
    case Family::kMamba2:
      return uint64_t{layer.value_heads};
    case Family::kMamba1:
      return uint64_t{layer.value_heads} * layer.d_k * layer.d_v;
    case Family::kGla:
    case Family::kDeltanet:
    case Family::kGdn:
    case Family::kKda:
      return uint64_t{0};
  }
  return RefuseUnknown(field + ".family", layer.family, "1 to 8");
}

absl::Status CheckDecayTable(const std::string& field, const LinearLayer& layer, uint64_t numbers) {
  if (layer.decay_table.size() != numbers) {
    return Refuse(field, absl::StrCat(layer.decay_table.size(), " numbers; this family needs ", numbers));
  }
  for (size_t i = 0; i < layer.decay_table.size(); ++i) {
    const float value = layer.decay_table[i];
    // −0 equals 0 but has other bytes. Equal layouts must have the same namespace.
    if (!std::isfinite(value) || std::bit_cast<uint32_t>(value) == 0x80000000u) {
      return Refuse(absl::StrCat(field, "[", i, "]"), "must be finite and not negative zero");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckConvolution(const std::string& field, const LinearLayer& layer) {
  if (layer.conv_order != TailOrder::kTokenFirst && layer.conv_order != TailOrder::kChannelFirst) {
    return RefuseUnknown(field + ".conv_order", layer.conv_order, "1 or 2");
  }
  if (layer.conv_channels == 0 && layer.conv_kernel == 0) {
    if (layer.conv_dtype.has_value()) return Refuse(field + ".conv_dtype", "must be 0 without convolution");
    if (layer.conv_order != TailOrder::kTokenFirst)
      return Refuse(field + ".conv_order", "must be 1 without convolution");
    return absl::OkStatus();
  }
  if (layer.conv_dtype.has_value()) {
    if (absl::Status status = CheckDType(field + ".conv_dtype", *layer.conv_dtype); !status.ok()) return status;
    if (IsFp8(*layer.conv_dtype)) return Refuse(field + ".conv_dtype", "fp8 is not supported for convolution tails");
    if (*layer.conv_dtype == layer.state_dtype)
      return Refuse(field + ".conv_dtype", "must be 0 when equal to state_dtype");
  }
  absl::Status status = First({
      CheckRange(field + ".conv_channels", layer.conv_channels, 1, limits::kMaxConvChannels),
      CheckRange(field + ".conv_kernel", layer.conv_kernel, 2, limits::kMaxConvKernel),
  });
  if (!status.ok()) return status;
  return CheckUnit(field + ".conv_channels", ConvTailBytes(layer));
}

absl::Status CheckLinear(const std::string& field, const LinearLayer& layer) {
  absl::Status status = First({
      CheckRange(field + ".key_heads", layer.key_heads, 1, limits::kMaxHeads),
      CheckRange(field + ".value_heads", layer.value_heads, 1, limits::kMaxHeads),
      CheckRange(field + ".d_k", layer.d_k, 1, limits::kMaxLinearHeadDim),
      CheckRange(field + ".d_v", layer.d_v, 1, limits::kMaxLinearHeadDim),
  });
  if (!status.ok()) return status;
  const absl::StatusOr<uint64_t> decay_numbers = DecayNumbersOf(field, layer);
  if (!decay_numbers.ok()) return decay_numbers.status();
  if (layer.value_heads % layer.key_heads != 0) {
    return Refuse(field + ".value_heads",
                  absl::StrCat(layer.value_heads, " is not a multiple of key_heads = ", layer.key_heads));
  }
  status = First({
      CheckDecayTable(field + ".decay_table", layer, *decay_numbers),
      CheckDType(field + ".state_dtype", layer.state_dtype),
  });
  if (!status.ok()) return status;
  if (IsFp8(layer.state_dtype)) return Refuse(field + ".state_dtype", "fp8 is not supported for states");
  const TransitionForm form = NaturalForm(layer.family);
  if (layer.transition != form) {
    return Refuse(field + ".transition", absl::StrCat(static_cast<int>(layer.transition),
                                                      " does not match the family; expected ", static_cast<int>(form)));
  }
  if (layer.order != StateOrder::kKeyFirst && layer.order != StateOrder::kValueFirst) {
    return RefuseUnknown(field + ".order", layer.order, "1 or 2");
  }
  status = CheckConvolution(field, layer);
  if (!status.ok()) return status;
  // R(p) commutes with scalar transitions only; no model needs more.
  if (layer.rope.kind != RopeStyle::kNone && layer.transition != TransitionForm::kScalar) {
    return Refuse(field + ".rope.kind", "RoPE in a linear layer requires a scalar transition");
  }
  return CheckRope(field + ".rope", layer.rope, layer.d_k);
}

absl::Status CheckOpaque(const std::string& field, const OpaqueLayer& layer) {
  if (layer.token_bytes == 0 && layer.state_bytes == 0)
    return Refuse(field + ".token_bytes", "0, and state_bytes is 0; expected at least one of them to be positive");
  return First({
      CheckUnit(field + ".token_bytes", layer.token_bytes),
      CheckRange(field + ".state_bytes", layer.state_bytes, 0, limits::kMaxObjectBytes),
  });
}

// Returns the bytes of one token in one layer's pages.
uint64_t RowBytes(const Layer& layer) {
  if (const auto* opaque = std::get_if<OpaqueLayer>(&layer)) return opaque->token_bytes;
  const auto* attention = std::get_if<AttentionLayer>(&layer);
  if (attention == nullptr) return 0;
  return uint64_t{attention->kv_heads} * (attention->key_dim + attention->value_dim) * ElementBytes(attention->dtype);
}

// Returns the bytes of tables in the encoding. Only tables can be large.
uint64_t TableBytes(const Layer& layer) {
  if (const auto* linear = std::get_if<LinearLayer>(&layer)) {
    return linear->decay_table.size() * sizeof(float) + linear->rope.frequencies.size() * sizeof(double);
  }
  const auto* attention = std::get_if<AttentionLayer>(&layer);
  return attention == nullptr ? 0 : attention->rope.frequencies.size() * sizeof(double);
}

}  // namespace

absl::Status Validate(const Layout& layout) {
  absl::Status status = First({
      CheckRange("layout.page_tokens", layout.page_tokens, 1, limits::kMaxPageTokens),
      CheckRange("layout.head", layout.head, 0, limits::kMaxSeam),
      CheckRange("layout.tail", layout.tail, 0, limits::kMaxSeam),
      CheckRange("layout.layers", layout.layers.size(), 1, limits::kMaxLayers),
  });
  if (!status.ok()) return status;
  uint64_t row_bytes = 0;
  uint64_t table_bytes = 0;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const std::string field = absl::StrCat("layout.layers[", i, "]");
    if (const auto* linear = std::get_if<LinearLayer>(&layout.layers[i])) {
      status = CheckLinear(field, *linear);
      if (status.ok() && linear->conv_kernel > 0 && layout.head < linear->conv_kernel - 1) {
        return Refuse("layout.head", absl::StrCat(layout.head, " is narrower than the convolution of ", field,
                                                  ": conv_kernel - 1 = ", linear->conv_kernel - 1));
      }
    } else if (const auto* opaque = std::get_if<OpaqueLayer>(&layout.layers[i])) {
      status = CheckOpaque(field, *opaque);
    } else {
      status = CheckAttention(field, std::get<AttentionLayer>(layout.layers[i]));
    }
    if (!status.ok()) return status;
    row_bytes += RowBytes(layout.layers[i]);
    table_bytes += TableBytes(layout.layers[i]);
  }
  if (row_bytes * layout.page_tokens > limits::kMaxObjectBytes) {
    return Refuse("layout.page_tokens", absl::StrCat("a page of ", row_bytes * layout.page_tokens,
                                                     " bytes is larger than an object of ", limits::kMaxObjectBytes));
  }
  if (table_bytes > limits::kMaxLayoutTableBytes) {
    return Refuse("layout.layers",
                  absl::StrCat("tables of ", table_bytes, " bytes; expected at most ", limits::kMaxLayoutTableBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckComposable(const Layout& layout) {
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    if (!std::holds_alternative<OpaqueLayer>(layout.layers[i])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("layout.layers[", i, "]: is opaque, and segments need layers that compose; use exact prefixes"));
  }
  return absl::OkStatus();
}

absl::Status Validate(const Identity& identity) {
  if (identity.weights_digest.empty()) return Refuse("identity.weights_digest", "must not be empty");
  return First({
      CheckRange("identity.model_id", identity.model_id.size(), 0, limits::kMaxStringBytes),
      CheckRange("identity.weights_digest", identity.weights_digest.size(), 1, limits::kMaxStringBytes),
      CheckRange("identity.dtype", identity.dtype.size(), 0, limits::kMaxStringBytes),
      CheckRange("identity.quantization", identity.quantization.size(), 0, limits::kMaxStringBytes),
      CheckRange("identity.tokenizer_digest", identity.tokenizer_digest.size(), 0, limits::kMaxStringBytes),
      CheckRange("identity.lora", identity.lora.size(), 0, limits::kMaxStringBytes),
  });
}

}  // namespace ashlar
