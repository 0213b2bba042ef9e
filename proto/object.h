// SPDX-License-Identifier: Apache-2.0
// The object format: one immutable run of bytes that holds everything cached for one key, the same in every tier and
// on the wire. Header, table of parts, parts (docs/formats.md has every byte; proto/testdata pins them).
//
// A part is an array of equal units (one head's matrix; a few tokens' keys). Units are aligned to 64 bytes and never
// straddle a multiple of limits::kExtentBytes, so an object may lie in scattered extents and every unit is still
// contiguous in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/limits.h"
#include "proto/shard.h"

namespace ashlar {

enum class Provenance : uint8_t { kExact = 1, kComposed = 2 };

enum class PartForm : uint8_t {
  kTransitionDense = 1,     // unit: one head's [d_k, d_k]
  kState = 2,               // unit: one head's [d_k, d_v] or [d_v, d_k], by the layout's state order
  kConvTail = 3,            // one unit: [conv_kernel − 1, conv_channels], pre-convolution inputs, oldest first
  kKeys = 4,                // unit: [unit_tokens, kv_heads, key_dim]; mla: latents
  kValues = 5,              // unit: [unit_tokens, kv_heads, value_dim]; mla: rotary key parts
  kKeyScales = 6,           // unit: [unit_tokens, kv_heads] fp32 scales for the keys in the unit with the same index
  kValueScales = 7,         // unit: [unit_tokens, kv_heads] fp32 scales for the values in the unit with the same index
  kTransitionScalar = 8,    // unit: one head's logarithm, fp32
  kTransitionDiagonal = 9,  // unit: one head's [d_k] logarithms, fp32
  kTransitionElementwise = 10,  // unit: one head's [d_v], Σ dt, fp32
  kTransitionLowRank = 11,  // unit: one head's diagonal [d_k] in fp32, then A and B, [rank, d_k] each: diag + Aᵀ B
  kTransitionZero = 12,     // units without bytes: heads with a zero transition
  kStateExponents = 13,     // one unit: [value_heads] i32; an fp16 state is its stored values × 2^exponent
  // Forms of spans: the inputs of the recurrence per token (kernels/linear.h), from which it can be run again.
  kSpanKeys = 14,        // unit: [unit_tokens, key_heads, d_k]
  kSpanValues = 15,      // unit: [unit_tokens, value_heads, d_v]
  kSpanGates = 16,       // unit: [unit_tokens, value_heads] fp32, or [unit_tokens, value_heads, d_k]: log decays
  kSpanBetas = 17,       // unit: [unit_tokens, value_heads] fp32, mamba1: [unit_tokens, value_heads, d_v]
  kSpanConvInputs = 18,  // unit: [unit_tokens, conv_channels], pre-convolution inputs
  kOpaqueRows = 19,      // unit: [unit_tokens, token_bytes] of an opaque layer
  kOpaqueState = 20,     // the state_bytes of an opaque layer, cut into units; the last one may be smaller
};
absl::string_view Name(PartForm form);
// Converts a transition form to its part form, and back. TransitionFormOf returns nothing for a part form that is not a
// transition.
PartForm PartFormOf(TransitionForm kind);
std::optional<TransitionForm> TransitionFormOf(PartForm form);
inline bool IsTransition(PartForm form) {
  return TransitionFormOf(form).has_value();
}
// The element type of dense transitions and low-rank factors for a given state type. Entries are at most about 1, where
// fp16 has eight times the precision of bf16, so 16-bit transitions are always fp16.
inline DType TransitionType(DType state) {
  return state == DType::kF32 ? DType::kF32 : DType::kF16;
}
// IsRows: keys, values and opaque rows, which lie in pages of an engine. IsScales: scales of keys and values. ScalesOf:
// the form of the scales of a form of rows; opaque rows have none.
inline bool IsRows(PartForm form) {
  return form == PartForm::kKeys || form == PartForm::kValues || form == PartForm::kOpaqueRows;
}
inline bool IsScales(PartForm form) {
  return form == PartForm::kKeyScales || form == PartForm::kValueScales;
}
inline bool IsPaged(PartForm form) {
  return IsRows(form) || IsScales(form);
}
// Returns whether the form holds inputs of linear layers in a span. A publish sends them as tensors. They are stored as
// rows, one per token, like keys and values.
inline bool IsSpanRows(PartForm form) {
  return form >= PartForm::kSpanKeys && form <= PartForm::kSpanConvInputs;
}
inline PartForm ScalesOf(PartForm rows) {
  return rows == PartForm::kKeys ? PartForm::kKeyScales : PartForm::kValueScales;
}

inline bool IsOpaque(PartForm form) {
  return form == PartForm::kOpaqueRows || form == PartForm::kOpaqueState;
}
// Returns the bytes of a unit of an opaque state, except the last, and the number of units.
inline uint32_t OpaqueUnitBytes(const OpaqueLayer& layer) {
  return static_cast<uint32_t>(std::min(layer.state_bytes, limits::kRowUnitBytes));
}
inline uint32_t OpaqueUnits(const OpaqueLayer& layer) {
  return static_cast<uint32_t>((layer.state_bytes + limits::kRowUnitBytes - 1) / limits::kRowUnitBytes);
}

struct Part {
  uint32_t layer = 0;
  uint16_t head_group = 0;  // transitions: the first of the consecutive heads in this part; 0 otherwise
  PartForm form = PartForm::kState;
  DType dtype = DType::kF32;  // type of the states that exponents scale
  uint32_t rank = 0;          // rank of low-rank transitions; 0 otherwise
  uint32_t units = 0;
  uint32_t unit_bytes = 0;  // bytes of every unit except the last; 0 only for zero transitions
  uint32_t last_unit_bytes = 0;
  uint32_t unit_tokens = 0;  // tokens per full unit of keys, values, scales and span rows
  uint64_t offset = 0;       // offset of unit 0 from the start of the object
  uint64_t checksum = 0;     // kernels::CombineChecksums over XXH3-64 of each unit

  bool Empty() const { return unit_bytes == 0; }  // no bytes are stored for the part
  uint64_t UnitOffset(uint32_t unit) const;       // the part must not be empty
  uint32_t UnitBytes(uint32_t unit) const { return unit + 1 == units ? last_unit_bytes : unit_bytes; }
  uint64_t End() const;  // end of the last unit from the start of the object; 0 for an empty part
  uint64_t Bytes() const { return units == 0 ? 0 : uint64_t{unit_bytes} * (units - 1) + last_unit_bytes; }
  bool operator==(const Part&) const = default;
};

struct ObjectHeader {
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  Provenance provenance = Provenance::kExact;
  TensorShard shard;           // the shard whose heads are stored; at most limits::kMaxTensorShards per key
  uint64_t tokens = 0;         // tokens of the whole run, including seams
  uint64_t first_token = 0;    // first token with stored keys and values
  uint64_t stored_tokens = 0;  // number of tokens with stored keys and values
  uint64_t bytes = 0;          // size of the object, including the header
  std::vector<Part> parts;
  bool operator==(const ObjectHeader&) const = default;

  const Part* Find(uint32_t layer, PartForm form) const;  // the first match if there are several
  std::span<const Part> Layer(uint32_t layer) const;      // all parts of one layer
  uint64_t Extents() const;                               // ceil(bytes / kExtentBytes)
};

// Plans the header of the object for a run of `tokens` tokens under `layout`; the checksums are zero.
// FAILED_PRECONDITION for a layout with an opaque layer, whose model has prefixes only. A kSegment stores the interior
// [head, tokens − tail), and the plan is FAILED_PRECONDITION if that is empty. A kCheckpoint stores all tokens and no
// transitions. Other kinds are UNIMPLEMENTED. The layout must be valid. Every transition has the natural form of its
// layer.
absl::StatusOr<ObjectHeader> PlanObject(const Layout& layout, const NamespaceId& ns, const Key& key, ObjectKind kind,
                                        uint64_t tokens);

// Plan the objects of an exact prefix (proto/prefix.h). PlanPrefixBlock: the block of `block_tokens` that ends at
// `end`, a multiple of `block_tokens`. PlanPrefixCheckpoint: the checkpoint at `depth`, with the keys and values after
// the last whole block. A block is FAILED_PRECONDITION under a layout without attention, because it would be empty.
absl::StatusOr<ObjectHeader> PlanPrefixBlock(const Layout& layout, const NamespaceId& ns, const Key& key,
                                             uint32_t block_tokens, uint64_t end);
absl::StatusOr<ObjectHeader> PlanPrefixCheckpoint(const Layout& layout, const NamespaceId& ns, const Key& key,
                                                  uint32_t block_tokens, uint64_t depth);

// Bytes per token in the parts of a span, for each form; 0 if the layer does not have the form. `dtype` is the type of
// keys and values.
struct SpanRowBytes {
  uint64_t keys = 0, values = 0, gates = 0, betas = 0, conv_inputs = 0;
};
SpanRowBytes SpanRowBytesOf(const LinearLayer& layer, DType dtype);

// Plans a span [begin, end) of a text (proto/prefix.h): the keys and values of its tokens, and the inputs of the
// recurrence of the linear layers. Keys and values of linear layers are stored in `dtype` (f32, f16 or bf16). All
// families have spans. INVALID_ARGUMENT begins with the field's name: an unsupported dtype, an empty span or one of
// more than limits::kMaxSpanTokens, a layer with rows longer than an extent. FAILED_PRECONDITION for a layout without
// linear layers, which has no state to rebuild, and for one with an opaque state, which cannot be rebuilt.
absl::StatusOr<ObjectHeader> PlanPrefixSpan(const Layout& layout, const NamespaceId& ns, const Key& key, DType dtype,
                                            uint64_t begin, uint64_t end);

// Consecutive heads of a layer that are stored in one form.
struct TransitionRun {
  uint32_t layer = 0;
  uint32_t first_head = 0;
  uint32_t heads = 0;
  TransitionForm form = TransitionForm::kDense;  // the layer's natural form or kZero; kLowRank only in dense layers
  uint32_t rank = 0;                             // kLowRank only: must take fewer bytes per head than dense
  bool operator==(const TransitionRun&) const = default;
};
// Checks that heads of a segment planned by PlanObject can be stored in this form. INVALID_ARGUMENT begins with the
// field's name.
absl::Status CheckRun(const ObjectHeader& plan, const TransitionRun& run);
// Returns the plan with the forms of `runs`. A layer without runs keeps its natural form. In a layer with runs, every
// head must be in exactly one run. INVALID_ARGUMENT if runs overlap, leave a head out, need more parts than a table
// holds, or need more extents than `plan`.
absl::StatusOr<ObjectHeader> PlanForms(const ObjectHeader& plan, std::span<const TransitionRun> runs);
// Bytes of the encoded header and table. The parts begin at the next multiple of kUnitAlignment. At most one extent.
uint64_t EncodedHeaderBytes(size_t parts);
std::string EncodeHeader(const ObjectHeader& header);

// Verifies the magic, version, size and checksum of the header at the start of `bytes`. DATA_LOSS names the error. A
// header that passes is unchanged since it was written. Cheaper than DecodeHeader.
absl::Status VerifyHeader(absl::string_view bytes);

// Parses and verifies the header at the start of `bytes`: magic, version, sizes and checksum; every part lies inside
// the object, in order, without overlap; every head of a segment has exactly one transition. DATA_LOSS names the error.
// Another process may write to `bytes` during the call.
absl::StatusOr<ObjectHeader> DecodeHeader(absl::string_view bytes);

}  // namespace ashlar
