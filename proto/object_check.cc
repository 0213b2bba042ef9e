// SPDX-License-Identifier: Apache-2.0
#include "proto/object_check.h"

#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

template <typename Enum>
absl::Status BadValue(absl::string_view field, Enum value, absl::string_view expected) {
  return BadHeader(absl::StrCat("unknown ", field, " ", static_cast<int>(value), "; expected ", expected));
}

absl::Status CheckFields(const ObjectHeader& header) {
  if (Name(header.kind) == "unknown") return BadValue("kind", header.kind, "1 to 4");
  if (header.provenance != Provenance::kExact && header.provenance != Provenance::kComposed) {
    return BadValue("provenance", header.provenance, "1 or 2");
  }
  if (header.shard.rank >= header.shard.size) return BadHeader("tensor-parallel rank out of range");
  if (header.tokens > limits::kMaxPromptTokens) return BadHeader("too many tokens");
  if (header.first_token > header.tokens || header.stored_tokens > header.tokens - header.first_token) {
    return BadHeader("stored tokens out of range");
  }
  if (header.bytes < EncodedHeaderBytes(header.parts.size()) || header.bytes > limits::kMaxObjectBytes) {
    return BadHeader("wrong object size");
  }
  return absl::OkStatus();
}

// Zero transitions contain only the heads that they apply to.
absl::Status CheckEmpty(const Part& part) {
  if (part.form != PartForm::kTransitionZero || part.units == 0) return BadHeader("wrong unit size");
  if (part.last_unit_bytes != 0) return BadHeader("wrong size of the last unit");
  if (part.unit_tokens != 0 || part.offset != 0 || part.checksum != 0) return BadHeader("part with bytes but size 0");
  return absl::OkStatus();
}

absl::Status CheckRows(const ObjectHeader& header, const Part& part) {
  if (part.unit_tokens == 0 || part.unit_bytes % part.unit_tokens != 0)
    return BadHeader("wrong number of tokens per unit");
  const uint64_t row_bytes = part.unit_bytes / part.unit_tokens;
  const uint64_t full_tokens = uint64_t{part.units - 1} * part.unit_tokens;
  if (header.stored_tokens <= full_tokens || (header.stored_tokens - full_tokens) * row_bytes != part.last_unit_bytes) {
    return BadHeader("units do not cover the stored tokens");
  }
  return absl::OkStatus();
}

// Checks one part alone.
absl::Status CheckPart(const ObjectHeader& header, const Part& part) {
  if (Name(part.form) == "unknown") return BadValue("form", part.form, "1 to 20");
  if (ElementBytes(part.dtype) == 0) return BadValue("dtype", part.dtype, "1 to 5");
  if (part.layer >= limits::kMaxLayers) return BadHeader("too many layers");
  if (part.head_group != 0 && !IsTransition(part.form)) return BadHeader("head group in a form without head groups");
  if ((part.rank != 0) != (part.form == PartForm::kTransitionLowRank)) {
    return BadHeader(part.rank != 0 ? "rank in a form without a rank" : "low rank without a rank");
  }
  if (part.Empty()) return CheckEmpty(part);
  if (part.units == 0 || part.unit_bytes > limits::kExtentBytes || part.form == PartForm::kTransitionZero) {
    return BadHeader("wrong unit size");
  }
  if (part.last_unit_bytes == 0 || part.last_unit_bytes > part.unit_bytes)
    return BadHeader("wrong size of the last unit");
  if (part.offset % limits::kUnitAlignment != 0) return BadHeader("offset not aligned");
  if (part.offset % limits::kExtentBytes + part.unit_bytes > limits::kExtentBytes)
    return BadHeader("unit crosses an extent boundary");
  if ((header.kind == ObjectKind::kSpan) != IsSpanRows(part.form) && !IsPaged(part.form)) {
    return BadHeader("part not allowed in this kind of object");
  }
  if (header.kind == ObjectKind::kSegment && IsOpaque(part.form)) return BadHeader("opaque part in a segment");
  if (part.dtype != DType::kF32 && (part.form == PartForm::kSpanGates || part.form == PartForm::kSpanBetas)) {
    return BadHeader("decays of a span must be fp32");
  }
  if (IsPaged(part.form) || IsSpanRows(part.form)) return CheckRows(header, part);
  const bool plain =
      part.unit_tokens == 0 && (part.last_unit_bytes == part.unit_bytes || part.form == PartForm::kOpaqueState);
  return plain ? absl::OkStatus() : BadHeader("matrices of different sizes");
}

// Checks the order and the offsets of all parts.
absl::Status CheckPlaces(const ObjectHeader& header) {
  uint64_t end = EncodedHeaderBytes(header.parts.size());
  const Part* previous = nullptr;
  for (const Part& part : header.parts) {
    if (absl::Status status = CheckPart(header, part); !status.ok()) return status;
    const auto order = [](const Part& p) { return std::tuple(p.layer, p.form, p.head_group); };
    if (previous != nullptr && order(*previous) >= order(part)) return BadHeader("parts out of order");
    previous = &part;
    if (part.Empty()) continue;
    if (part.offset < end) return BadHeader("parts overlap");
    if (part.offset >= header.bytes) return BadHeader("part outside the object");
    end = part.UnitOffset(part.units - 1) + part.last_unit_bytes;
    if (end > header.bytes) return BadHeader("part outside the object");
  }
  return absl::OkStatus();
}

// Checks that every head of a segment's state has exactly one transition, and that a checkpoint has none.
absl::Status CheckHeads(const ObjectHeader& header, uint32_t layer) {
  std::vector<bool> seen;
  uint64_t covered = 0;
  const Part* const state = header.Find(layer, PartForm::kState);
  if (state != nullptr) {
    if (state->units > limits::kMaxHeads) return BadHeader("too many heads");
    seen.resize(state->units);
  }
  for (const Part& part : header.Layer(layer)) {
    if (!IsTransition(part.form)) continue;
    if (header.kind != ObjectKind::kSegment) return BadHeader("transition in a kind of object without transitions");
    if (uint64_t{part.head_group} + part.units > seen.size()) return BadHeader("transition head out of range");
    for (uint32_t head = part.head_group; head < part.head_group + part.units; ++head) {
      if (seen[head]) return BadHeader("two transitions for one head");
      seen[head] = true;
    }
    covered += part.units;
  }
  if (header.kind == ObjectKind::kSegment && covered != seen.size()) return BadHeader("head without a transition");
  return absl::OkStatus();
}

// States in fp16 have exponents, one per head; other states have none. 16-bit transitions are fp16 if the states have
// 16 bits.
absl::Status CheckTypes(const ObjectHeader& header, uint32_t layer) {
  const Part* const state = header.Find(layer, PartForm::kState);
  const Part* const exponents = header.Find(layer, PartForm::kStateExponents);
  const bool needed = state != nullptr && state->dtype == DType::kF16;
  if ((exponents != nullptr) != needed) {
    return BadHeader(needed ? "states without exponents" : "exponents for states without exponents");
  }
  if (needed && (exponents->dtype != DType::kF16 || exponents->units != 1 ||
                 exponents->unit_bytes != state->units * sizeof(int32_t))) {
    return BadHeader("exponents do not match the states");
  }
  for (const Part& part : header.Layer(layer)) {
    const std::optional<TransitionForm> kind = TransitionFormOf(part.form);
    if (!kind.has_value() || state == nullptr) continue;
    const bool logarithms =
        *kind != TransitionForm::kDense && *kind != TransitionForm::kLowRank && *kind != TransitionForm::kZero;
    if (part.dtype != (logarithms ? DType::kF32 : TransitionType(state->dtype))) {
      return BadHeader("wrong transition dtype");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BadHeader(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("object header: ", what));
}

absl::Status CheckObject(const ObjectHeader& header) {
  if (absl::Status status = CheckFields(header); !status.ok()) return status;
  if (absl::Status status = CheckPlaces(header); !status.ok()) return status;
  const Part* previous = nullptr;
  for (const Part& part : header.parts) {
    const bool begins = previous == nullptr || previous->layer != part.layer;
    previous = &part;
    if (!begins) continue;
    if (absl::Status status = CheckTypes(header, part.layer); !status.ok()) return status;
    if (absl::Status status = CheckHeads(header, part.layer); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace ashlar
