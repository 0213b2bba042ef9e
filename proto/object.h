// SPDX-License-Identifier: Apache-2.0
// The object format: one immutable run of bytes that holds everything cached for one key, the same in every tier and
// on the wire. Header, table of parts, parts (docs/formats.md has every byte; proto/testdata pins them).
//
// A part is an array of equal units (one head's matrix; a few tokens' keys). Units are aligned to 64 bytes and never
// straddle a multiple of limits::kExtentBytes, so an object may lie in scattered extents and every unit is still
// contiguous in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/shard.h"

namespace ashlar {

enum class Provenance : uint8_t { kExact = 1, kComposed = 2 };

enum class PartForm : uint8_t {
  kTransitionDense = 1,         // unit: one head's [d_k, d_k]
  kState = 2,                   // unit: one head's [d_k, d_v] or [d_v, d_k], as the layout's state order says
  kConvTail = 3,                // one unit: [conv_kernel − 1, conv_channels], pre-convolution inputs, oldest first
  kKeys = 4,                    // unit: [unit_tokens, kv_heads, key_dim]; mla: latents
  kValues = 5,                  // unit: [unit_tokens, kv_heads, value_dim]; mla: rotary key parts
  kKeyScales = 6,               // unit: [unit_tokens, kv_heads] fp32, of the keys of the unit of the same number
  kValueScales = 7,             // the same of values
  kTransitionScalar = 8,        // unit: one head's logarithm, fp32
  kTransitionDiagonal = 9,      // unit: one head's [d_k] logarithms, fp32
  kTransitionElementwise = 10,  // unit: one head's [d_v], Σ dt, fp32
  kTransitionLowRank = 11,  // unit: one head's diagonal [d_k] in fp32, then A and B, [rank, d_k] each: diag + Aᵀ B
  kTransitionZero = 12,     // units without bytes: heads whose transition is zero
  kStateExponents = 13,     // one unit: [value_heads] i32; an fp16 state is its numbers × 2^exponent
  // Forms of spans: the recurrence's inputs of each token (kernels/linear.h), so that it can run again.
  kSpanKeys = 14,        // unit: [unit_tokens, key_heads, d_k]
  kSpanValues = 15,      // unit: [unit_tokens, value_heads, d_v]
  kSpanGates = 16,       // unit: [unit_tokens, value_heads] fp32, or [unit_tokens, value_heads, d_k]: log decays
  kSpanBetas = 17,       // unit: [unit_tokens, value_heads] fp32, mamba1: [unit_tokens, value_heads, d_v]
  kSpanConvInputs = 18,  // unit: [unit_tokens, conv_channels], pre-convolution inputs
};
absl::string_view Name(PartForm form);
// The form of heads that are stored as `kind`, and back; none for forms that are no transitions.
PartForm PartFormOf(TransitionForm kind);
std::optional<TransitionForm> TransitionFormOf(PartForm form);
inline bool IsTransition(PartForm form) {
  return TransitionFormOf(form).has_value();
}
// The element type of dense transitions and of low-rank factors beside states of a type. Entries are at most about 1,
// where fp16 has eight times the precision of bf16 at the same size, so 16-bit transitions are always fp16.
inline DType TransitionType(DType state) {
  return state == DType::kF32 ? DType::kF32 : DType::kF16;
}
// Keys and values, which lie in an engine's pages; their scales; either. The form of the scales of rows.
inline bool IsRows(PartForm form) {
  return form == PartForm::kKeys || form == PartForm::kValues;
}
inline bool IsScales(PartForm form) {
  return form == PartForm::kKeyScales || form == PartForm::kValueScales;
}
inline bool IsPaged(PartForm form) {
  return IsRows(form) || IsScales(form);
}
// Returns whether the form is a span's inputs of linear layers. A publish sends them as tensors; they are stored as
// rows, one a token, as keys and values are.
inline bool IsSpanRows(PartForm form) {
  return form >= PartForm::kSpanKeys && form <= PartForm::kSpanConvInputs;
}
inline PartForm ScalesOf(PartForm rows) {
  return rows == PartForm::kKeys ? PartForm::kKeyScales : PartForm::kValueScales;
}

struct Part {
  uint32_t layer = 0;
  uint16_t head_group = 0;  // transitions: the first of the consecutive heads whose units these are; 0 otherwise
  PartForm form = PartForm::kState;
  DType dtype = DType::kF32;  // exponents: of the states that they scale
  uint32_t rank = 0;          // of low-rank transitions; 0 otherwise
  uint32_t units = 0;
  uint32_t unit_bytes = 0;  // of every unit but the last; 0 for zero transitions alone
  uint32_t last_unit_bytes = 0;
  uint32_t unit_tokens = 0;  // keys, values, their scales, rows of spans: tokens in a full unit
  uint64_t offset = 0;       // of unit 0, from the object's start
  uint64_t checksum = 0;     // kernels::CombineChecksums over XXH3-64 of each unit

  bool Empty() const { return unit_bytes == 0; }  // nothing of it is stored
  uint64_t UnitOffset(uint32_t unit) const;       // not of an empty part
  uint32_t UnitBytes(uint32_t unit) const { return unit + 1 == units ? last_unit_bytes : unit_bytes; }
  uint64_t End() const;  // behind the last unit, from the object's start; 0 of an empty part
  uint64_t Bytes() const { return units == 0 ? 0 : uint64_t{unit_bytes} * (units - 1) + last_unit_bytes; }
  bool operator==(const Part&) const = default;
};

struct ObjectHeader {
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  Provenance provenance = Provenance::kExact;
  TensorShard shard;           // its heads are those of this shard; at most limits::kMaxTensorShards of one key
  uint64_t tokens = 0;         // of the whole run, seams included
  uint64_t first_token = 0;    // the first token whose keys and values are stored
  uint64_t stored_tokens = 0;  // tokens whose keys and values are stored
  uint64_t bytes = 0;          // of the object, header included
  std::vector<Part> parts;
  bool operator==(const ObjectHeader&) const = default;

  const Part* Find(uint32_t layer, PartForm form) const;  // the first of several
  std::span<const Part> Layer(uint32_t layer) const;      // all parts of one layer
  uint64_t Extents() const;                               // ceil(bytes / kExtentBytes)
};

// The header of the object that a run of `tokens` tokens has under `layout`, checksums still zero. For kSegment the
// interior [head, tokens − tail) is stored, FAILED_PRECONDITION when it is empty; for kCheckpoint all tokens and no
// transitions. Other kinds: UNIMPLEMENTED. The layout must be valid. Every head's transition has its layer's own form.
absl::StatusOr<ObjectHeader> PlanObject(const Layout& layout, const NamespaceId& ns, const Key& key, ObjectKind kind,
                                        uint64_t tokens);

// Plan the objects of an exact prefix (proto/prefix.h): the block of `block_tokens` that ends at `end`, a multiple of
// them; and the checkpoint at `depth`, with the keys and values behind the last whole block. FAILED_PRECONDITION for a
// block under a layout without attention, which has nothing to store in it.
absl::StatusOr<ObjectHeader> PlanPrefixBlock(const Layout& layout, const NamespaceId& ns, const Key& key,
                                             uint32_t block_tokens, uint64_t end);
absl::StatusOr<ObjectHeader> PlanPrefixCheckpoint(const Layout& layout, const NamespaceId& ns, const Key& key,
                                                  uint32_t block_tokens, uint64_t depth);

// Bytes of one token in the parts of a span, of each form that a layer has; 0: it has none. `dtype`: of keys and
// values.
struct SpanRowBytes {
  uint64_t keys = 0, values = 0, gates = 0, betas = 0, conv_inputs = 0;
};
SpanRowBytes SpanRowBytesOf(const LinearLayer& layer, DType dtype);

// Plans a span [begin, end) of a text (proto/prefix.h): its tokens' keys and values, and the inputs of the linear
// layers' recurrence, keys and values of these in `dtype` (f32, f16 or bf16). All families have spans. INVALID_ARGUMENT
// begins with the field's name: a dtype that spans do not have, an empty span or one of more than
// limits::kMaxSpanTokens, a layer whose rows are longer than an extent. FAILED_PRECONDITION for a layout without linear
// layers, which has nothing to rebuild.
absl::StatusOr<ObjectHeader> PlanPrefixSpan(const Layout& layout, const NamespaceId& ns, const Key& key, DType dtype,
                                            uint64_t begin, uint64_t end);

// Consecutive heads of a layer whose transitions are stored in one form.
struct TransitionRun {
  uint32_t layer = 0;
  uint32_t first_head = 0;
  uint32_t heads = 0;
  TransitionForm form = TransitionForm::kDense;  // the layer's own or kZero; in dense layers also kLowRank
  uint32_t rank = 0;                             // kLowRank: so small that a head takes fewer bytes than dense
  bool operator==(const TransitionRun&) const = default;
};
// Checks that a segment that PlanObject planned may have its heads stored in this form. INVALID_ARGUMENT begins with
// the field's name.
absl::Status CheckRun(const ObjectHeader& plan, const TransitionRun& run);
// Returns the plan with these forms. Layers that no run names keep their own form; every head of the others is in
// exactly one run. INVALID_ARGUMENT for runs that overlap or leave a head out, for more parts than a table holds, and
// for a plan of more extents than `plan`.
absl::StatusOr<ObjectHeader> PlanForms(const ObjectHeader& plan, std::span<const TransitionRun> runs);
// Bytes of the encoded header and table; parts begin at the next multiple of kUnitAlignment. Always within one extent.
uint64_t EncodedHeaderBytes(size_t parts);
std::string EncodeHeader(const ObjectHeader& header);

// Verifies magic, version and size of a header at the start of `bytes`, and its own checksum. DATA_LOSS names the
// error. A header that passes is unchanged since it was written. Cheaper than parsing.
absl::Status VerifyHeader(absl::string_view bytes);

// Parses and verifies a header at the start of `bytes`: magic, version, sizes, the header's own checksum, that every
// part lies inside the object, in order, without overlap, and that every head of a segment's state has exactly one
// transition. DATA_LOSS names what is wrong. Another process may write to `bytes` meanwhile.
absl::StatusOr<ObjectHeader> DecodeHeader(absl::string_view bytes);

}  // namespace ashlar
