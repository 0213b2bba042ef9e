// SPDX-License-Identifier: Apache-2.0
// Plans objects: the parts that an object of a layout stores, their forms, and their offsets.
#include <algorithm>
#include <bit>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

// Header and table fit in one extent. The deepest layout has space for three parts per layer, enough for linear layers.
// Only layouts whose layers all have four parts (attention with scales, fp16 states with a convolution) exceed it, by
// two layers.
const size_t kMaxParts =
    (limits::kExtentBytes - EncodedHeaderBytes(0)) / (EncodedHeaderBytes(1) - EncodedHeaderBytes(0));

uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

Part Matrices(uint32_t layer, PartForm form, DType dtype, uint32_t units, uint64_t bytes) {
  return {.layer = layer,
          .form = form,
          .dtype = dtype,
          .units = units,
          .unit_bytes = static_cast<uint32_t>(bytes),
          .last_unit_bytes = static_cast<uint32_t>(bytes)};
}

Part Tokens(uint32_t layer, PartForm form, DType dtype, uint64_t row_bytes, uint64_t unit_tokens, uint64_t tokens) {
  const uint64_t units = (tokens + unit_tokens - 1) / unit_tokens;
  return {.layer = layer,
          .form = form,
          .dtype = dtype,
          .units = static_cast<uint32_t>(units),
          .unit_bytes = static_cast<uint32_t>(unit_tokens * row_bytes),
          .last_unit_bytes = static_cast<uint32_t>((tokens - (units - 1) * unit_tokens) * row_bytes),
          .unit_tokens = static_cast<uint32_t>(unit_tokens)};
}

void AddLinear(uint32_t index, const LinearLayer& layer, ObjectHeader& header) {
  const uint64_t element = ElementBytes(layer.state_dtype);
  if (header.kind == ObjectKind::kSegment) {
    const DType dtype = layer.transition == TransitionForm::kDense ? TransitionType(layer.state_dtype) : DType::kF32;
    header.parts.push_back(Matrices(index, PartFormOf(layer.transition), dtype, layer.value_heads,
                                    TransitionBytes(TupleShapeOf(layer), layer.state_dtype, layer.transition)));
  }
  header.parts.push_back(
      Matrices(index, PartForm::kState, layer.state_dtype, layer.value_heads, element * layer.d_k * layer.d_v));
  if (layer.conv_channels > 0) {
    header.parts.push_back(Matrices(index, PartForm::kConvTail, ConvType(layer), 1, ConvTailBytes(layer)));
  }
  if (layer.state_dtype == DType::kF16) {
    header.parts.push_back(
        Matrices(index, PartForm::kStateExponents, DType::kF16, 1, layer.value_heads * sizeof(int32_t)));
  }
}

// Plans one row of `row_bytes` per token, in units that fit in a core's cache if a row does.
Part Rows(uint32_t layer, PartForm form, DType dtype, uint64_t row_bytes, uint64_t tokens) {
  const uint64_t unit_tokens = std::max<uint64_t>(1, std::bit_floor(limits::kRowUnitBytes / row_bytes));
  return Tokens(layer, form, dtype, row_bytes, unit_tokens, tokens);
}

// Adds keys or values with this number of elements per token, and their scales. Units of both have the same number of
// tokens.
void AddRows(uint32_t index, PartForm form, const AttentionLayer& layer, uint64_t dim, ObjectHeader& header) {
  if (header.stored_tokens == 0) return;
  const uint64_t row_bytes = layer.kv_heads * dim * ElementBytes(layer.dtype);
  const Part rows = header.parts.emplace_back(Rows(index, form, layer.dtype, row_bytes, header.stored_tokens));
  if (!layer.scales) return;
  header.parts.push_back(Tokens(index, ScalesOf(form), DType::kF32, layer.kv_heads * sizeof(float), rows.unit_tokens,
                                header.stored_tokens));
}

void AddOpaque(uint32_t index, const OpaqueLayer& layer, ObjectHeader& header) {
  if (layer.token_bytes > 0 && header.stored_tokens > 0)
    header.parts.push_back(Rows(index, PartForm::kOpaqueRows, kOpaqueType, layer.token_bytes, header.stored_tokens));
  if (layer.state_bytes == 0 || header.kind != ObjectKind::kCheckpoint) return;
  const uint32_t units = OpaqueUnits(layer), unit_bytes = OpaqueUnitBytes(layer);
  header.parts.push_back(
      {.layer = index,
       .form = PartForm::kOpaqueState,
       .dtype = kOpaqueType,
       .units = units,
       .unit_bytes = unit_bytes,
       .last_unit_bytes = static_cast<uint32_t>(layer.state_bytes - (units - uint64_t{1}) * unit_bytes)});
}

// Returns how many numbers (log decay, and β or dt) a family has per token and head; 0 for none.
uint64_t GateWidth(const LinearLayer& layer) {
  switch (layer.family) {
    case Family::kGdn:
      return 1;
    case Family::kGla:
    case Family::kKda:
      return layer.d_k;
    default:
      return 0;
  }
}
uint64_t BetaWidth(const LinearLayer& layer) {
  switch (layer.family) {
    case Family::kRetnet:
    case Family::kLightning:
    case Family::kGla:
      return 0;
    case Family::kMamba1:
      return layer.d_v;
    default:
      return 1;
  }
}

// Adds the inputs of the recurrence for a span's tokens. Decays and β stay fp32, because errors of decays accumulate
// over the span.
absl::Status AddSpan(uint32_t index, const LinearLayer& layer, DType dtype, ObjectHeader& header) {
  const SpanRowBytes bytes = SpanRowBytesOf(layer, dtype);
  const struct {
    PartForm form;
    DType dtype;
    uint64_t row_bytes;
  } all[] = {{PartForm::kSpanKeys, dtype, bytes.keys},
             {PartForm::kSpanValues, dtype, bytes.values},
             {PartForm::kSpanGates, DType::kF32, bytes.gates},
             {PartForm::kSpanBetas, DType::kF32, bytes.betas},
             {PartForm::kSpanConvInputs, ConvType(layer), bytes.conv_inputs}};
  for (const auto& rows : all) {
    if (rows.row_bytes == 0) continue;
    if (rows.row_bytes > limits::kExtentBytes) {
      return absl::InvalidArgumentError(absl::StrCat("layout.layers[", index, "]: ", Name(rows.form),
                                                     " of a token take ", rows.row_bytes, " bytes; an extent has ",
                                                     limits::kExtentBytes));
    }
    header.parts.push_back(Rows(index, rows.form, rows.dtype, rows.row_bytes, header.stored_tokens));
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(uint64_t tokens) {
  if (tokens > 0 && tokens <= limits::kMaxPromptTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tokens: ", tokens, " is out of range; expected 1 to ", limits::kMaxPromptTokens));
}

// Sets the range of tokens whose keys and values an object of this kind stores.
absl::Status PlanTokens(const Layout& layout, ObjectHeader& header) {
  switch (header.kind) {
    case ObjectKind::kSegment: {
      const uint64_t seams = uint64_t{layout.head} + layout.tail;
      if (header.tokens <= seams) {
        return absl::FailedPreconditionError(
            absl::StrCat("tokens: ", header.tokens, " tokens leave no interior between seams of ", seams));
      }
      header.first_token = layout.head;
      header.stored_tokens = header.tokens - seams;
      return absl::OkStatus();
    }
    case ObjectKind::kCheckpoint:
      header.first_token = 0;
      header.stored_tokens = header.tokens;
      return absl::OkStatus();
    default:
      return absl::UnimplementedError(absl::StrCat("kind: ", Name(header.kind), " has no stored form"));
  }
}

// Sorts the parts and assigns consecutive offsets.
void LayOut(ObjectHeader& header) {
  std::ranges::sort(header.parts, {},
                    [](const Part& part) { return std::tuple(part.layer, part.form, part.head_group); });
  header.bytes = EncodedHeaderBytes(header.parts.size());
  for (Part& part : header.parts) {
    part.offset = 0;
    if (part.Empty()) continue;
    part.offset = AlignUp(header.bytes, limits::kUnitAlignment);
    if (part.offset % limits::kExtentBytes + part.unit_bytes > limits::kExtentBytes) {
      part.offset = AlignUp(part.offset, limits::kExtentBytes);
    }
    header.bytes = part.UnitOffset(part.units - 1) + part.last_unit_bytes;
  }
}

// Returns the part of a layer's transitions in a plan of PlanObject; null if there is none.
const Part* PlannedTransitions(const ObjectHeader& plan, uint32_t layer) {
  const std::span<const Part> parts = plan.Layer(layer);
  const auto found = std::ranges::find_if(parts, [](const Part& part) { return IsTransition(part.form); });
  return found == parts.end() ? nullptr : &*found;
}

// Returns the bytes of a low-rank unit; `dense` determines d_k.
uint64_t LowRankBytes(const Part& dense, uint32_t rank) {
  const uint64_t numbers = dense.unit_bytes / ElementBytes(dense.dtype);
  const TupleShape shape{.d_k = static_cast<uint32_t>(std::lround(std::sqrt(static_cast<double>(numbers))))};
  return TransitionBytes(shape, dense.dtype, TransitionForm::kLowRank, rank);
}

// Returns the part that stores a run that CheckRun has accepted. `planned`: the layer's transitions.
Part PartOf(const TransitionRun& run, const Part& planned, DType state) {
  uint64_t bytes = planned.unit_bytes;
  if (run.form == TransitionForm::kLowRank) bytes = LowRankBytes(planned, run.rank);
  if (run.form == TransitionForm::kZero) bytes = 0;
  const bool own = PartFormOf(run.form) == planned.form;
  Part part = Matrices(run.layer, PartFormOf(run.form), own ? planned.dtype : TransitionType(state), run.heads, bytes);
  part.head_group = static_cast<uint16_t>(run.first_head);
  part.rank = run.rank;
  return part;
}

// Adds the parts that `header` requires, with offsets. `span`: type of a span's keys and values.
absl::StatusOr<ObjectHeader> PlanParts(const Layout& layout, ObjectHeader header, DType span = DType::kF32) {
  header.parts.reserve(4 * layout.layers.size());
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    if (const auto* linear = std::get_if<LinearLayer>(&layout.layers[i])) {
      if (header.kind == ObjectKind::kPrefixBlock) continue;
      if (header.kind != ObjectKind::kSpan) {
        AddLinear(i, *linear, header);
      } else if (absl::Status status = AddSpan(i, *linear, span, header); !status.ok()) {
        return status;
      }
    } else if (const auto* opaque = std::get_if<OpaqueLayer>(&layout.layers[i])) {
      AddOpaque(i, *opaque, header);
    } else {
      const auto& attention = std::get<AttentionLayer>(layout.layers[i]);
      AddRows(i, PartForm::kKeys, attention, attention.key_dim, header);
      AddRows(i, PartForm::kValues, attention, attention.value_dim, header);
    }
  }
  if (header.parts.size() > kMaxParts) {
    return Invalid("layout.layers: ", header.parts.size(), " parts; an object has at most ", kMaxParts);
  }
  LayOut(header);
  if (header.bytes > limits::kMaxObjectBytes) {
    return Invalid("tokens: ", header.tokens, " tokens make an object of ", header.bytes, " bytes; expected at most ",
                   limits::kMaxObjectBytes, " are allowed");
  }
  return header;
}

}  // namespace

absl::StatusOr<ObjectHeader> PlanObject(const Layout& layout, const NamespaceId& ns, const Key& key, ObjectKind kind,
                                        uint64_t tokens) {
  ObjectHeader header{.ns = ns, .key = key, .kind = kind, .tokens = tokens};
  if (absl::Status status = CheckTokens(tokens); !status.ok()) return status;
  if (absl::Status status = CheckComposable(layout); !status.ok()) return status;
  if (absl::Status status = PlanTokens(layout, header); !status.ok()) return status;
  return PlanParts(layout, std::move(header));
}

absl::StatusOr<ObjectHeader> PlanPrefixBlock(const Layout& layout, const NamespaceId& ns, const Key& key,
                                             uint32_t block_tokens, uint64_t end) {
  ObjectHeader header{.ns = ns, .key = key, .kind = ObjectKind::kPrefixBlock, .tokens = end};
  if (absl::Status status = CheckTokens(end); !status.ok()) return status;
  if (end % block_tokens != 0)
    return Invalid("tokens: ", end, " is not a multiple of the block of ", block_tokens, " tokens");
  header.first_token = end - block_tokens;
  header.stored_tokens = block_tokens;
  absl::StatusOr<ObjectHeader> planned = PlanParts(layout, std::move(header));
  if (planned.ok() && planned->parts.empty()) {
    return absl::FailedPreconditionError("layout.layers: no layer has keys and values");
  }
  return planned;
}

absl::StatusOr<ObjectHeader> PlanPrefixCheckpoint(const Layout& layout, const NamespaceId& ns, const Key& key,
                                                  uint32_t block_tokens, uint64_t depth) {
  ObjectHeader header{.ns = ns, .key = key, .kind = ObjectKind::kCheckpoint, .tokens = depth};
  if (absl::Status status = CheckTokens(depth); !status.ok()) return status;
  header.first_token = depth / block_tokens * block_tokens;
  header.stored_tokens = depth - header.first_token;
  return PlanParts(layout, std::move(header));
}

SpanRowBytes SpanRowBytesOf(const LinearLayer& layer, DType dtype) {
  const uint64_t heads = layer.value_heads;
  return {.keys = uint64_t{layer.key_heads} * layer.d_k * ElementBytes(dtype),
          .values = heads * layer.d_v * ElementBytes(dtype),
          .gates = heads * GateWidth(layer) * sizeof(float),
          .betas = heads * BetaWidth(layer) * sizeof(float),
          .conv_inputs = uint64_t{layer.conv_channels} * ElementBytes(ConvType(layer))};
}

absl::StatusOr<ObjectHeader> PlanPrefixSpan(const Layout& layout, const NamespaceId& ns, const Key& key, DType dtype,
                                            uint64_t begin, uint64_t end) {
  ObjectHeader header{.ns = ns, .key = key, .kind = ObjectKind::kSpan, .tokens = end};
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    return Invalid("dtype: expected f32, f16 or bf16 for a span");
  }
  if (absl::Status status = CheckTokens(end); !status.ok()) return status;
  if (begin == 0 || begin >= end)
    return Invalid("begin: ", begin, " is out of range; expected at least 1 and less than ", end);
  if (end - begin > limits::kMaxSpanTokens) {
    return Invalid("begin: a span of ", end - begin, " tokens; expected at most ", limits::kMaxSpanTokens);
  }
  const auto is_linear = [](const Layer& layer) { return std::holds_alternative<LinearLayer>(layer); };
  if (!std::ranges::any_of(layout.layers, is_linear)) {
    return absl::FailedPreconditionError("layout.layers: no layer has a state to rebuild");
  }
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    if (!std::holds_alternative<OpaqueLayer>(layout.layers[i]) || !HasState(layout.layers[i])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("layout.layers[", i, "].state_bytes: an opaque state cannot be rebuilt from a span"));
  }
  header.first_token = begin;
  header.stored_tokens = end - begin;
  return PlanParts(layout, std::move(header), dtype);
}

absl::Status CheckRun(const ObjectHeader& plan, const TransitionRun& run) {
  const Part* const planned = PlannedTransitions(plan, run.layer);
  if (planned == nullptr) return Invalid("layer: ", run.layer, " has no transitions");
  if (run.first_head >= planned->units) {
    return Invalid("first_head: ", run.first_head, " is out of range; the layer has ", planned->units, " heads");
  }
  if (run.heads == 0 || run.heads > planned->units - run.first_head) {
    return Invalid("heads: first_head + heads is ", run.first_head, " + ", run.heads, "; the layer has ",
                   planned->units, " heads");
  }
  const bool dense = planned->form == PartForm::kTransitionDense;
  switch (run.form) {
    case TransitionForm::kZero:
      break;
    case TransitionForm::kLowRank:
      if (!dense) return Invalid("form: low rank requires a layer with dense transitions");
      if (run.rank == 0) return Invalid("rank: must be at least 1");
      if (LowRankBytes(*planned, run.rank) >= planned->unit_bytes) {
        return Invalid("rank: ", run.rank, " takes as many bytes as dense; use dense");
      }
      return absl::OkStatus();
    default:
      if (PartFormOf(run.form) != planned->form) {
        return Invalid("form: ", static_cast<int>(PartFormOf(run.form)),
                       " does not match the family of the layer; expected ", static_cast<int>(planned->form));
      }
  }
  if (run.rank != 0) return Invalid("rank: must be 0; only low rank has a rank");
  return absl::OkStatus();
}

absl::StatusOr<ObjectHeader> PlanForms(const ObjectHeader& plan, std::span<const TransitionRun> runs) {
  ObjectHeader header = plan;
  std::vector<TransitionRun> sorted(runs.begin(), runs.end());
  std::ranges::sort(sorted, {}, [](const TransitionRun& run) { return std::pair(run.layer, run.first_head); });
  header.parts.clear();
  auto next = sorted.begin();
  for (const Part& part : plan.parts) {
    if (!IsTransition(part.form) || next == sorted.end() || next->layer != part.layer) {
      header.parts.push_back(part);
      continue;
    }
    const DType state = plan.Find(part.layer, PartForm::kState)->dtype;
    uint32_t head = 0;
    for (; next != sorted.end() && next->layer == part.layer; ++next) {
      if (absl::Status status = CheckRun(plan, *next); !status.ok()) return status;
      if (next->first_head < head)
        return Invalid("layer ", part.layer, ": head ", next->first_head, " has two transitions");
      if (next->first_head > head) return Invalid("layer ", part.layer, ": head ", head, " has no transition");
      header.parts.push_back(PartOf(*next, part, state));
      head += next->heads;
    }
    if (head != part.units) return Invalid("layer ", part.layer, ": head ", head, " has no transition");
  }
  if (next != sorted.end()) return Invalid("layer: ", next->layer, " has no transitions");
  if (header.parts.size() > kMaxParts) {
    return Invalid(header.parts.size(), " parts; an object has at most ", kMaxParts);
  }
  LayOut(header);
  if (header.Extents() > plan.Extents()) {
    return Invalid("the given forms take ", header.Extents(), " extents; the natural forms take only ", plan.Extents());
  }
  return header;
}

}  // namespace ashlar
