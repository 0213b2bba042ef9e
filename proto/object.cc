#include "proto/object.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are copied as they lie in memory");

constexpr absl::string_view kMagic = "AshlarOb";
constexpr uint32_t kFormatVersion = 1;

// Byte offsets of the header's fields (docs/formats.md).
namespace at {
constexpr size_t kMagic = 0;           // 8 bytes
constexpr size_t kVersion = 8;         // u32
constexpr size_t kHeaderBytes = 12;    // u32
constexpr size_t kChecksum = 16;       // u64
constexpr size_t kPartCount = 24;      // u32
constexpr size_t kKind = 28;           // u8
constexpr size_t kProvenance = 29;     // u8
constexpr size_t kReserved = 30;       // 2 bytes, zero
constexpr size_t kNamespace = 32;      // 32 bytes
constexpr size_t kKey = 64;            // 32 bytes
constexpr size_t kTokens = 96;         // u64
constexpr size_t kFirstToken = 104;    // u64
constexpr size_t kStoredTokens = 112;  // u64
constexpr size_t kObjectBytes = 120;   // u64
constexpr size_t kParts = 128;
}  // namespace at

// The same for one entry of the table of parts.
namespace part_at {
constexpr size_t kLayer = 0;           // u32
constexpr size_t kHeadGroup = 4;       // u16
constexpr size_t kForm = 6;            // u8
constexpr size_t kDType = 7;           // u8
constexpr size_t kRank = 8;            // u32
constexpr size_t kUnits = 12;          // u32
constexpr size_t kUnitBytes = 16;      // u32
constexpr size_t kLastUnitBytes = 20;  // u32
constexpr size_t kUnitTokens = 24;     // u32
constexpr size_t kReserved = 28;       // 4 bytes, zero
constexpr size_t kOffset = 32;         // u64
constexpr size_t kChecksum = 40;       // u64
constexpr size_t kReserved2 = 48;      // 16 bytes, zero
constexpr size_t kBytes = 64;
}  // namespace part_at

// Header and table lie in one extent. The deepest layout has room for three parts a layer, as a linear layer has them;
// only one of nothing but attention layers with scales, four parts each, is too deep by two.
constexpr size_t kMaxParts = (limits::kExtentBytes - at::kParts) / part_at::kBytes;
static_assert(limits::kMaxLayers * 3 <= kMaxParts);

template <typename T>
void Put(std::string& bytes, size_t offset, const T& value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

template <typename T>
T Get(absl::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

bool AllZero(absl::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// XXH3-64 of the header and table, its own field read as zero.
uint64_t HeaderChecksum(absl::string_view header) {
  std::string copy(header);
  copy.replace(at::kChecksum, sizeof(uint64_t), sizeof(uint64_t), '\0');
  return XXH3_64bits(copy.data(), copy.size());
}

// Lays parts out one behind the other.
class Planner {
 public:
  Planner(ObjectHeader& header, size_t parts) : header_(header), end_(EncodedHeaderBytes(parts)) {}

  void Matrices(uint32_t layer, PartForm form, DType dtype, uint32_t units, uint64_t elements) {
    const auto bytes = static_cast<uint32_t>(elements * ElementBytes(dtype));
    Append(
        {.layer = layer, .form = form, .dtype = dtype, .units = units, .unit_bytes = bytes, .last_unit_bytes = bytes});
  }

  // Keys or values, tokens of so many elements, and their scales, which have units of as many tokens.
  void Rows(uint32_t layer, PartForm form, const AttentionLayer& attention, uint64_t dim) {
    const uint64_t row_bytes = attention.kv_heads * dim * ElementBytes(attention.dtype);
    const uint64_t unit_tokens = std::max<uint64_t>(1, std::bit_floor(limits::kRowUnitBytes / row_bytes));
    AppendTokens(layer, form, attention.dtype, row_bytes, unit_tokens);
  }
  void Scales(uint32_t layer, PartForm rows, const AttentionLayer& attention) {
    const uint32_t unit_tokens = header_.Find(layer, rows)->unit_tokens;
    AppendTokens(layer, ScalesOf(rows), DType::kF32, attention.kv_heads * uint64_t{sizeof(float)}, unit_tokens);
  }

  uint64_t end() const { return end_; }

 private:
  void AppendTokens(uint32_t layer, PartForm form, DType dtype, uint64_t row_bytes, uint64_t unit_tokens) {
    const uint64_t units = (header_.stored_tokens + unit_tokens - 1) / unit_tokens;
    Append({.layer = layer,
            .form = form,
            .dtype = dtype,
            .units = static_cast<uint32_t>(units),
            .unit_bytes = static_cast<uint32_t>(unit_tokens * row_bytes),
            .last_unit_bytes = static_cast<uint32_t>((header_.stored_tokens - (units - 1) * unit_tokens) * row_bytes),
            .unit_tokens = static_cast<uint32_t>(unit_tokens)});
  }

  void Append(Part part) {
    part.offset = AlignUp(end_, limits::kUnitAlignment);
    if (part.offset % limits::kExtentBytes + part.unit_bytes > limits::kExtentBytes) {
      part.offset = AlignUp(part.offset, limits::kExtentBytes);
    }
    end_ = part.UnitOffset(part.units - 1) + part.last_unit_bytes;
    header_.parts.push_back(part);
  }

  ObjectHeader& header_;
  uint64_t end_;
};

absl::Status Undefined(size_t layer, absl::string_view field, absl::string_view why) {
  return absl::UnimplementedError(absl::StrCat("layout.layers[", layer, "].", field, ": ", why));
}

// Valid layouts may name what version 1 of the format has no stored form for.
absl::Status CheckStoredForms(const Layout& layout) {
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const auto* linear = std::get_if<LinearLayer>(&layout.layers[i]);
    if (linear == nullptr) continue;
    if (linear->transition != TransitionKind::kDense) {
      return Undefined(i, "transition", "only dense transitions have a stored form");
    }
    if (linear->state_dtype != DType::kF32) return Undefined(i, "state_dtype", "only fp32 has a stored form");
  }
  return absl::OkStatus();
}

// Which tokens' keys and values an object of this kind stores.
absl::Status PlanTokens(const Layout& layout, ObjectHeader& header) {
  if (header.tokens == 0 || header.tokens > limits::kMaxPromptTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: ", header.tokens, " is not within 1 to ", limits::kMaxPromptTokens));
  }
  switch (header.kind) {
    case ObjectKind::kSegment: {
      const uint64_t seams = uint64_t{layout.head} + layout.tail;
      if (header.tokens <= seams) {
        return absl::FailedPreconditionError(
            absl::StrCat("tokens: ", header.tokens, " leave no interior between seams of ", seams));
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

size_t PartCount(const Layout& layout, ObjectKind kind) {
  size_t parts = 0;
  for (const Layer& layer : layout.layers) {
    const auto* linear = std::get_if<LinearLayer>(&layer);
    if (linear == nullptr) {
      parts += std::get<AttentionLayer>(layer).scales ? 4 : 2;
    } else {
      parts += 1 + (kind == ObjectKind::kSegment) + (linear->conv_channels > 0);
    }
  }
  return parts;
}

absl::Status DataLoss(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("object header: ", what));
}

absl::Status CheckPart(const ObjectHeader& header, const Part& part) {
  if (Name(part.form) == "unknown") return DataLoss("unknown form");
  if (ElementBytes(part.dtype) == 0) return DataLoss("unknown dtype");
  if (part.layer >= limits::kMaxLayers) return DataLoss("too many layers");
  if (part.head_group != 0) return DataLoss("unknown head group");
  if (part.rank != 0) return DataLoss("rank of a form that has none");
  if (part.units == 0 || part.unit_bytes == 0 || part.unit_bytes > limits::kExtentBytes) return DataLoss("unit size");
  if (part.last_unit_bytes == 0 || part.last_unit_bytes > part.unit_bytes) return DataLoss("last unit's size");
  if (part.offset % limits::kUnitAlignment != 0) return DataLoss("offset not aligned");
  if (part.offset % limits::kExtentBytes + part.unit_bytes > limits::kExtentBytes) return DataLoss("straddles extents");
  if (!IsPaged(part.form)) {
    const bool plain = part.unit_tokens == 0 && part.last_unit_bytes == part.unit_bytes;
    return plain ? absl::OkStatus() : DataLoss("matrices of unequal size");
  }
  if (part.unit_tokens == 0 || part.unit_bytes % part.unit_tokens != 0) return DataLoss("tokens in a unit");
  const uint64_t row_bytes = part.unit_bytes / part.unit_tokens;
  const uint64_t full_tokens = uint64_t{part.units - 1} * part.unit_tokens;
  if (header.stored_tokens <= full_tokens || (header.stored_tokens - full_tokens) * row_bytes != part.last_unit_bytes) {
    return DataLoss("units do not hold the stored tokens");
  }
  return absl::OkStatus();
}

absl::Status CheckParts(const ObjectHeader& header) {
  uint64_t end = EncodedHeaderBytes(header.parts.size());
  const Part* previous = nullptr;
  for (const Part& part : header.parts) {
    if (absl::Status status = CheckPart(header, part); !status.ok()) return status;
    const auto order = [](const Part& p) { return std::pair(p.layer, p.form); };
    if (previous != nullptr && order(*previous) >= order(part)) return DataLoss("parts out of order");
    if (part.offset < end) return DataLoss("parts overlap");
    if (part.offset >= header.bytes) return DataLoss("part outside the object");
    end = part.UnitOffset(part.units - 1) + part.last_unit_bytes;
    if (end > header.bytes) return DataLoss("part outside the object");
    previous = &part;
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const ObjectHeader& header) {
  if (Name(header.kind) == "unknown") return DataLoss("unknown kind");
  if (header.provenance != Provenance::kExact && header.provenance != Provenance::kComposed) {
    return DataLoss("unknown provenance");
  }
  if (header.tokens > limits::kMaxPromptTokens) return DataLoss("too many tokens");
  if (header.first_token > header.tokens || header.stored_tokens > header.tokens - header.first_token) {
    return DataLoss("stored tokens outside the run");
  }
  if (header.bytes < EncodedHeaderBytes(header.parts.size()) || header.bytes > limits::kMaxObjectBytes) {
    return DataLoss("object size");
  }
  return absl::OkStatus();
}

void PutPart(std::string& bytes, size_t base, const Part& part) {
  Put(bytes, base + part_at::kLayer, part.layer);
  Put(bytes, base + part_at::kHeadGroup, part.head_group);
  Put(bytes, base + part_at::kForm, part.form);
  Put(bytes, base + part_at::kDType, part.dtype);
  Put(bytes, base + part_at::kRank, part.rank);
  Put(bytes, base + part_at::kUnits, part.units);
  Put(bytes, base + part_at::kUnitBytes, part.unit_bytes);
  Put(bytes, base + part_at::kLastUnitBytes, part.last_unit_bytes);
  Put(bytes, base + part_at::kUnitTokens, part.unit_tokens);
  Put(bytes, base + part_at::kOffset, part.offset);
  Put(bytes, base + part_at::kChecksum, part.checksum);
}

Part GetPart(absl::string_view entry) {
  return {.layer = Get<uint32_t>(entry, part_at::kLayer),
          .head_group = Get<uint16_t>(entry, part_at::kHeadGroup),
          .form = Get<PartForm>(entry, part_at::kForm),
          .dtype = Get<DType>(entry, part_at::kDType),
          .rank = Get<uint32_t>(entry, part_at::kRank),
          .units = Get<uint32_t>(entry, part_at::kUnits),
          .unit_bytes = Get<uint32_t>(entry, part_at::kUnitBytes),
          .last_unit_bytes = Get<uint32_t>(entry, part_at::kLastUnitBytes),
          .unit_tokens = Get<uint32_t>(entry, part_at::kUnitTokens),
          .offset = Get<uint64_t>(entry, part_at::kOffset),
          .checksum = Get<uint64_t>(entry, part_at::kChecksum)};
}

}  // namespace

absl::string_view Name(PartForm form) {
  switch (form) {
    case PartForm::kTransitionDense:
      return "transition_dense";
    case PartForm::kState:
      return "state";
    case PartForm::kConvTail:
      return "conv_tail";
    case PartForm::kKeys:
      return "keys";
    case PartForm::kValues:
      return "values";
    case PartForm::kKeyScales:
      return "key_scales";
    case PartForm::kValueScales:
      return "value_scales";
  }
  return "unknown";
}

uint64_t Part::UnitOffset(uint32_t unit) const {
  const uint64_t stride = AlignUp(unit_bytes, limits::kUnitAlignment);
  const uint64_t extent_start = offset / limits::kExtentBytes * limits::kExtentBytes;
  const uint64_t first_extent_units = (limits::kExtentBytes - (offset - extent_start) - unit_bytes) / stride + 1;
  if (unit < first_extent_units) return offset + unit * stride;
  const uint64_t extent_units = (limits::kExtentBytes - unit_bytes) / stride + 1;
  const uint64_t rest = unit - first_extent_units;
  return extent_start + (1 + rest / extent_units) * limits::kExtentBytes + rest % extent_units * stride;
}

const Part* ObjectHeader::Find(uint32_t layer, PartForm form) const {
  // Parts ascend by layer, then form: both from PlanObject and from DecodeHeader.
  const auto found = std::lower_bound(parts.begin(), parts.end(), std::pair(layer, form),
                                      [](const Part& part, const std::pair<uint32_t, PartForm>& wanted) {
                                        return std::pair(part.layer, part.form) < wanted;
                                      });
  return found != parts.end() && found->layer == layer && found->form == form ? &*found : nullptr;
}

uint64_t ObjectHeader::Extents() const {
  return (bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
}

absl::StatusOr<ObjectHeader> PlanObject(const Layout& layout, const NamespaceId& ns, const Key& key, ObjectKind kind,
                                        uint64_t tokens) {
  ObjectHeader header{.ns = ns, .key = key, .kind = kind, .tokens = tokens};
  if (absl::Status status = PlanTokens(layout, header); !status.ok()) return status;
  if (absl::Status status = CheckStoredForms(layout); !status.ok()) return status;
  const size_t parts = PartCount(layout, kind);
  if (parts > kMaxParts) {
    return absl::InvalidArgumentError(
        absl::StrCat("layout.layers: they have ", parts, " parts, ", kMaxParts, " fit an object's table"));
  }
  header.parts.reserve(parts);
  Planner plan(header, parts);
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    if (const auto* linear = std::get_if<LinearLayer>(&layout.layers[i])) {
      const DType dtype = linear->state_dtype;
      const uint32_t heads = linear->value_heads;
      if (kind == ObjectKind::kSegment) {
        plan.Matrices(i, PartForm::kTransitionDense, dtype, heads, uint64_t{linear->d_k} * linear->d_k);
      }
      plan.Matrices(i, PartForm::kState, dtype, heads, uint64_t{linear->d_k} * linear->d_v);
      if (linear->conv_channels > 0) {
        plan.Matrices(i, PartForm::kConvTail, dtype, 1, uint64_t{linear->conv_kernel - 1} * linear->conv_channels);
      }
    } else {
      const auto& attention = std::get<AttentionLayer>(layout.layers[i]);
      plan.Rows(i, PartForm::kKeys, attention, attention.key_dim);
      plan.Rows(i, PartForm::kValues, attention, attention.value_dim);
      if (attention.scales) {
        plan.Scales(i, PartForm::kKeys, attention);
        plan.Scales(i, PartForm::kValues, attention);
      }
    }
  }
  header.bytes = plan.end();
  if (header.bytes > limits::kMaxObjectBytes) {
    return absl::InvalidArgumentError(absl::StrCat("tokens: ", tokens, " make an object of ", header.bytes, " bytes, ",
                                                   limits::kMaxObjectBytes, " are allowed"));
  }
  return header;
}

uint64_t EncodedHeaderBytes(size_t parts) {
  return at::kParts + parts * part_at::kBytes;
}

std::string EncodeHeader(const ObjectHeader& header) {
  std::string bytes(EncodedHeaderBytes(header.parts.size()), '\0');
  std::memcpy(bytes.data() + at::kMagic, kMagic.data(), kMagic.size());
  Put(bytes, at::kVersion, kFormatVersion);
  Put(bytes, at::kHeaderBytes, static_cast<uint32_t>(bytes.size()));
  Put(bytes, at::kPartCount, static_cast<uint32_t>(header.parts.size()));
  Put(bytes, at::kKind, header.kind);
  Put(bytes, at::kProvenance, header.provenance);
  Put(bytes, at::kNamespace, header.ns.bytes);
  Put(bytes, at::kKey, header.key.bytes);
  Put(bytes, at::kTokens, header.tokens);
  Put(bytes, at::kFirstToken, header.first_token);
  Put(bytes, at::kStoredTokens, header.stored_tokens);
  Put(bytes, at::kObjectBytes, header.bytes);
  for (size_t i = 0; i < header.parts.size(); ++i) {
    PutPart(bytes, at::kParts + i * part_at::kBytes, header.parts[i]);
  }
  Put(bytes, at::kChecksum, HeaderChecksum(bytes));
  return bytes;
}

absl::Status VerifyHeader(absl::string_view bytes) {
  if (bytes.size() < at::kParts) return DataLoss("truncated");
  if (bytes.substr(at::kMagic, kMagic.size()) != kMagic) return DataLoss("wrong magic");
  const auto version = Get<uint32_t>(bytes, at::kVersion);
  if (version != kFormatVersion) return DataLoss(absl::StrCat("unknown version ", version));
  const auto header_bytes = Get<uint32_t>(bytes, at::kHeaderBytes);
  const auto part_count = Get<uint32_t>(bytes, at::kPartCount);
  if (header_bytes != EncodedHeaderBytes(part_count) || header_bytes > limits::kExtentBytes) {
    return DataLoss("header size");
  }
  if (bytes.size() < header_bytes) return DataLoss("truncated");
  bytes = bytes.substr(0, header_bytes);
  if (Get<uint64_t>(bytes, at::kChecksum) != HeaderChecksum(bytes)) return DataLoss("wrong checksum");
  return absl::OkStatus();
}

absl::StatusOr<ObjectHeader> DecodeHeader(absl::string_view bytes) {
  if (absl::Status status = VerifyHeader(bytes); !status.ok()) return status;
  bytes = bytes.substr(0, Get<uint32_t>(bytes, at::kHeaderBytes));
  const auto part_count = Get<uint32_t>(bytes, at::kPartCount);
  if (!AllZero(bytes.substr(at::kReserved, at::kNamespace - at::kReserved))) return DataLoss("reserved bytes");

  ObjectHeader header{.ns = Get<NamespaceId>(bytes, at::kNamespace),
                      .key = Get<Key>(bytes, at::kKey),
                      .kind = Get<ObjectKind>(bytes, at::kKind),
                      .provenance = Get<Provenance>(bytes, at::kProvenance),
                      .tokens = Get<uint64_t>(bytes, at::kTokens),
                      .first_token = Get<uint64_t>(bytes, at::kFirstToken),
                      .stored_tokens = Get<uint64_t>(bytes, at::kStoredTokens),
                      .bytes = Get<uint64_t>(bytes, at::kObjectBytes)};
  header.parts.reserve(part_count);
  for (size_t i = 0; i < part_count; ++i) {
    const absl::string_view entry = bytes.substr(at::kParts + i * part_at::kBytes, part_at::kBytes);
    if (!AllZero(entry.substr(part_at::kReserved, part_at::kOffset - part_at::kReserved)) ||
        !AllZero(entry.substr(part_at::kReserved2))) {
      return DataLoss("reserved bytes");
    }
    header.parts.push_back(GetPart(entry));
  }
  if (absl::Status status = CheckFields(header); !status.ok()) return status;
  if (absl::Status status = CheckParts(header); !status.ok()) return status;
  return header;
}

}  // namespace ashlar
