// SPDX-License-Identifier: Apache-2.0
// The encoding of an object's header.
#include <algorithm>
#include <bit>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/object_check.h"

namespace ashlar {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are copied as they lie in memory");

constexpr absl::string_view kMagic = "AshlarOb";
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kMaxHeaderBytes = limits::kExtentBytes;

// Byte offsets of the header's fields (docs/formats.md).
namespace at {
constexpr size_t kMagic = 0;           // 8 bytes
constexpr size_t kVersion = 8;         // u32
constexpr size_t kHeaderBytes = 12;    // u32
constexpr size_t kChecksum = 16;       // u64
constexpr size_t kPartCount = 24;      // u32
constexpr size_t kKind = 28;           // u8
constexpr size_t kProvenance = 29;     // u8
constexpr size_t kShardRank = 30;      // u8
constexpr size_t kOtherShards = 31;    // u8: number of further shards with the same key
constexpr size_t kNamespace = 32;      // 32 bytes
constexpr size_t kKey = 64;            // 32 bytes
constexpr size_t kTokens = 96;         // u64
constexpr size_t kFirstToken = 104;    // u64
constexpr size_t kStoredTokens = 112;  // u64
constexpr size_t kObjectBytes = 120;   // u64
constexpr size_t kParts = 128;
}  // namespace at

// Byte offsets in an entry of the table of parts.
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

// XXH3-64 of header and table, computed with this field set to zero.
uint64_t HeaderChecksum(absl::string_view header) {
  constexpr uint64_t kZero = 0;
  constexpr size_t kAfterChecksum = at::kChecksum + sizeof kZero;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, header.data(), at::kChecksum);
  XXH3_64bits_update(&state, &kZero, sizeof kZero);
  XXH3_64bits_update(&state, header.data() + kAfterChecksum, header.size() - kAfterChecksum);
  return XXH3_64bits_digest(&state);
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
  Put(bytes, at::kShardRank, static_cast<uint8_t>(header.shard.rank));
  Put(bytes, at::kOtherShards, static_cast<uint8_t>(header.shard.size - 1));
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
  if (bytes.size() < at::kParts) return BadHeader("truncated");
  if (bytes.substr(at::kMagic, kMagic.size()) != kMagic) return BadHeader("wrong magic");
  const auto version = Get<uint32_t>(bytes, at::kVersion);
  if (version != kFormatVersion) {
    return BadHeader(absl::StrCat("format version ", version, "; expected ", kFormatVersion));
  }
  const auto header_bytes = Get<uint32_t>(bytes, at::kHeaderBytes);
  const auto part_count = Get<uint32_t>(bytes, at::kPartCount);
  if (header_bytes != EncodedHeaderBytes(part_count) || header_bytes > kMaxHeaderBytes) {
    return BadHeader("wrong header size");
  }
  if (bytes.size() < header_bytes) return BadHeader("truncated");
  bytes = bytes.substr(0, header_bytes);
  if (Get<uint64_t>(bytes, at::kChecksum) != HeaderChecksum(bytes)) return BadHeader("wrong checksum");
  return absl::OkStatus();
}

absl::StatusOr<ObjectHeader> DecodeHeader(absl::string_view stored) {
  if (stored.size() < at::kParts) return BadHeader("truncated");
  // The owner of the memory may write concurrently, so a copy is verified and decoded.
  const size_t size = std::clamp<size_t>(Get<uint32_t>(stored, at::kHeaderBytes), at::kParts, kMaxHeaderBytes);
  const std::string bytes(stored.substr(0, size));
  if (absl::Status status = VerifyHeader(bytes); !status.ok()) return status;
  const auto part_count = Get<uint32_t>(bytes, at::kPartCount);

  ObjectHeader header{
      .ns = Get<NamespaceId>(bytes, at::kNamespace),
      .key = Get<Key>(bytes, at::kKey),
      .kind = Get<ObjectKind>(bytes, at::kKind),
      .provenance = Get<Provenance>(bytes, at::kProvenance),
      .shard = {.rank = Get<uint8_t>(bytes, at::kShardRank), .size = Get<uint8_t>(bytes, at::kOtherShards) + 1u},
      .tokens = Get<uint64_t>(bytes, at::kTokens),
      .first_token = Get<uint64_t>(bytes, at::kFirstToken),
      .stored_tokens = Get<uint64_t>(bytes, at::kStoredTokens),
      .bytes = Get<uint64_t>(bytes, at::kObjectBytes)};
  header.parts.reserve(part_count);
  for (size_t i = 0; i < part_count; ++i) {
    const absl::string_view entry = absl::string_view(bytes).substr(at::kParts + i * part_at::kBytes, part_at::kBytes);
    if (!AllZero(entry.substr(part_at::kReserved, part_at::kOffset - part_at::kReserved)) ||
        !AllZero(entry.substr(part_at::kReserved2))) {
      return BadHeader("reserved bytes are not 0");
    }
    header.parts.push_back(GetPart(entry));
  }
  if (absl::Status status = CheckObject(header); !status.ok()) return status;
  return header;
}

}  // namespace ashlar
