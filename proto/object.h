// The object format: one immutable run of bytes that holds everything cached for one key, the same in every tier and
// on the wire. Header, table of parts, parts (docs/formats.md has every byte; proto/testdata pins them).
//
// A part is an array of equal units (one head's matrix; a few tokens' keys). Units are aligned to 64 bytes and never
// straddle a multiple of limits::kExtentBytes, so an object may lie in scattered extents and every unit is still
// contiguous in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

enum class Provenance : uint8_t { kExact = 1, kComposed = 2 };

enum class PartForm : uint8_t {
  kTransitionDense = 1,  // unit: one head's [d_k, d_k]
  kState = 2,            // unit: one head's [d_k, d_v] or [d_v, d_k], as the layout's state order says
  kConvTail = 3,         // one unit: [conv_kernel − 1, conv_channels], pre-convolution inputs, oldest first
  kKeys = 4,             // unit: [unit_tokens, kv_heads, key_dim]; mla: latents
  kValues = 5,           // unit: [unit_tokens, kv_heads, value_dim]; mla: rotary key parts
  kKeyScales = 6,        // unit: [unit_tokens, kv_heads] fp32, of the keys of the unit of the same number
  kValueScales = 7,      // the same of values
};
absl::string_view Name(PartForm form);
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
inline PartForm ScalesOf(PartForm rows) {
  return rows == PartForm::kKeys ? PartForm::kKeyScales : PartForm::kValueScales;
}

struct Part {
  uint32_t layer = 0;
  uint16_t head_group = 0;  // 0: all heads
  PartForm form = PartForm::kState;
  DType dtype = DType::kF32;
  uint32_t rank = 0;  // of a low-rank transition; 0 otherwise
  uint32_t units = 0;
  uint32_t unit_bytes = 0;  // of every unit but the last
  uint32_t last_unit_bytes = 0;
  uint32_t unit_tokens = 0;  // keys, values and their scales: tokens in a full unit
  uint64_t offset = 0;       // of unit 0, from the object's start
  uint64_t checksum = 0;     // kernels::CombineChecksums over XXH3-64 of each unit

  uint64_t UnitOffset(uint32_t unit) const;
  uint32_t UnitBytes(uint32_t unit) const { return unit + 1 == units ? last_unit_bytes : unit_bytes; }
  uint64_t Bytes() const { return units == 0 ? 0 : uint64_t{unit_bytes} * (units - 1) + last_unit_bytes; }
  bool operator==(const Part&) const = default;
};

struct ObjectHeader {
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  Provenance provenance = Provenance::kExact;
  uint64_t tokens = 0;         // of the whole run, seams included
  uint64_t first_token = 0;    // the first token whose keys and values are stored: `head`, or 0 for a checkpoint
  uint64_t stored_tokens = 0;  // tokens whose keys and values are stored
  uint64_t bytes = 0;          // of the object, header included
  std::vector<Part> parts;
  bool operator==(const ObjectHeader&) const = default;

  const Part* Find(uint32_t layer, PartForm form) const;
  uint64_t Extents() const;  // ceil(bytes / kExtentBytes)
};

// The header of the object that a run of `tokens` tokens has under `layout`, checksums still zero. For kSegment the
// interior [head, tokens − tail) is stored, FAILED_PRECONDITION when it is empty; for kCheckpoint all tokens and no
// transitions. Other kinds: UNIMPLEMENTED. The layout must be valid.
absl::StatusOr<ObjectHeader> PlanObject(const Layout& layout, const NamespaceId& ns, const Key& key, ObjectKind kind,
                                        uint64_t tokens);

// Bytes of the encoded header and table; parts begin at the next multiple of kUnitAlignment. Always within one extent.
uint64_t EncodedHeaderBytes(size_t parts);
std::string EncodeHeader(const ObjectHeader& header);

// Verifies magic, version and size of a header at the start of `bytes`, and its own checksum. DATA_LOSS names what is
// wrong. What passes is what was written: cheaper than parsing it.
absl::Status VerifyHeader(absl::string_view bytes);

// Parses and verifies a header at the start of `bytes`: magic, version, sizes, the header's own checksum, and that
// every part lies inside the object, in order, without overlap. DATA_LOSS names what is wrong.
absl::StatusOr<ObjectHeader> DecodeHeader(absl::string_view bytes);

}  // namespace ashlar
