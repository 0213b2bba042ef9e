// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_format.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "proto/limits.h"

namespace ashlar::storage {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are copied as they lie in memory");

constexpr std::string_view kManifestMagic = "AshlarSm";
constexpr std::string_view kSlabMagic = "AshlarSl";
constexpr std::string_view kRecordMagic = "AshlarSr";
constexpr std::string_view kRecordPrefix = "object/";
static_assert(kManifestName < kRecordPrefix);
constexpr uint32_t kMostVersion = 255;  // highest version that a build may plausibly have written; no build wrote 0

template <typename T>
void Append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void AppendChecksum(std::string& bytes) {
  Append(bytes, kernels::UnitChecksum(bytes.data(), bytes.size()));
}

// Reads fields from the front of bytes. After the end all values are zero and ok() is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Take() {
    T value{};
    const std::string_view bytes = Take(sizeof value);
    if (ok_) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view Take(uint64_t bytes) {
    ok_ = ok_ && bytes <= rest_.size();
    if (!ok_) return {};
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  bool ok() const { return ok_; }
  size_t rest() const { return rest_.size(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

// Returns the bytes without their checksum; empty if the checksum is wrong.
std::string_view Checked(std::string_view bytes) {
  uint64_t checksum;
  if (bytes.size() < sizeof checksum) return {};
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof checksum);
  std::memcpy(&checksum, bytes.data() + body.size(), sizeof checksum);
  return checksum == kernels::UnitChecksum(body.data(), body.size()) ? body : std::string_view{};
}

std::string EncodeId(std::string_view magic, const SlabId& id) {
  std::string bytes(magic);
  Append(bytes, kSsdFormatVersion);
  Append(bytes, static_cast<uint32_t>(limits::kExtentBytes));
  Append(bytes, id);
  AppendChecksum(bytes);
  return bytes;
}

// Magic and version come first in every version, so that another version is reported as such and not as damage.
absl::StatusOr<SlabId> DecodeId(absl::string_view what, std::string_view magic, std::string_view bytes) {
  Reader reader(bytes);
  if (reader.Take(magic.size()) != magic) return absl::DataLossError(absl::StrCat(what, ": wrong magic"));
  const auto version = reader.Take<uint32_t>();
  if (reader.ok() && version != kSsdFormatVersion) {
    // If everything else is of this version, only the version number was damaged.
    std::string ours(bytes);
    std::memcpy(ours.data() + magic.size(), &kSsdFormatVersion, sizeof kSsdFormatVersion);
    if (!Checked(ours).empty()) {
      return absl::DataLossError(absl::StrCat(what, ": format version ", version,
                                              " is damaged: the checksum matches version ", kSsdFormatVersion));
    }
    if (version == 0 || version > kMostVersion) {
      return absl::DataLossError(
          absl::StrCat(what, ": format version ", version, " is damaged; expected 1 to ", kMostVersion));
    }
    return absl::FailedPreconditionError(absl::StrCat(what, ": format version ", version, "; expected ",
                                                      kSsdFormatVersion,
                                                      "; use the release that wrote it, or remove the tier's files"));
  }
  const auto extent_bytes = reader.Take<uint32_t>();
  const auto id = reader.Take<SlabId>();
  if (!reader.ok() || reader.rest() != sizeof(uint64_t) || Checked(bytes).empty()) {
    return absl::DataLossError(absl::StrCat(what, ": wrong size or checksum"));
  }
  if (extent_bytes != limits::kExtentBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": extents of ", extent_bytes, " bytes; expected ", limits::kExtentBytes));
  }
  return id;
}

absl::Status RecordError(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("ssd record: ", what));
}

}  // namespace

std::string EncodeManifest(const SlabId& id) {
  return EncodeId(kManifestMagic, id);
}

absl::StatusOr<SlabId> DecodeManifest(std::string_view bytes) {
  return DecodeId("ssd manifest", kManifestMagic, bytes);
}

std::string EncodeSlabHeader(const SlabId& id) {
  return EncodeId(kSlabMagic, id);
}

absl::StatusOr<SlabId> DecodeSlabHeader(std::string_view bytes) {
  if (std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; })) {
    return absl::NotFoundError("ssd slab: has no header");
  }
  return DecodeId("ssd slab", kSlabMagic, bytes);
}

std::string RecordName(const Key& key, uint64_t sequence) {
  std::string name(kRecordPrefix);
  Append(name, key.bytes);
  Append(name, sequence);
  return name;
}

std::string EncodeRecord(const SsdRecord& record) {
  std::string bytes(kRecordMagic);
  Append(bytes, kSsdFormatVersion);
  Append(bytes, static_cast<uint32_t>(record.tenant.size()));
  Append(bytes, record.sequence);
  Append(bytes, static_cast<uint32_t>(record.runs.size()));
  Append(bytes, static_cast<uint32_t>(record.pool));
  bytes += record.tenant;
  for (const ExtentRun& run : record.runs) {
    Append(bytes, run.first);
    Append(bytes, run.count);
  }
  bytes += EncodeHeader(record.header);
  AppendChecksum(bytes);
  return bytes;
}

absl::StatusOr<SsdRecord> DecodeRecord(std::string_view name, std::string_view bytes) {
  const std::string_view body = Checked(bytes);
  if (body.empty()) return RecordError("wrong checksum");
  Reader reader(body);
  if (reader.Take(kRecordMagic.size()) != kRecordMagic) return RecordError("wrong magic");
  const auto version = reader.Take<uint32_t>();
  if (reader.ok() && version != kSsdFormatVersion) {
    return RecordError(absl::StrCat("format version ", version, "; expected ", kSsdFormatVersion));
  }
  const auto tenant_bytes = reader.Take<uint32_t>();
  SsdRecord record{.sequence = reader.Take<uint64_t>()};
  const auto runs = reader.Take<uint32_t>();
  const auto pool = reader.Take<uint32_t>();
  record.tenant = reader.Take(tenant_bytes);
  if (!reader.ok() || runs > reader.rest() / (2 * sizeof(uint32_t))) return RecordError("truncated");
  if (pool > static_cast<uint32_t>(PoolKind::kPrivate)) return RecordError("unknown pool");
  record.pool = static_cast<PoolKind>(pool);
  uint64_t extents = 0;
  for (uint32_t i = 0; i < runs; ++i) {
    const auto first = reader.Take<uint32_t>();
    const auto count = reader.Take<uint32_t>();
    if (count == 0 || count > UINT32_MAX - first) return RecordError("invalid run of extents");
    record.runs.push_back({.first = first, .count = count});
    extents += count;
  }
  const std::string_view encoded = reader.Take(reader.rest());
  absl::StatusOr<ObjectHeader> header = DecodeHeader({encoded.data(), encoded.size()});
  if (!header.ok()) return header.status();
  record.header = *std::move(header);
  if (encoded.size() != EncodedHeaderBytes(record.header.parts.size())) return RecordError("bytes after the header");
  if (extents != record.header.Extents()) return RecordError("number of extents does not match the object");
  if (name != RecordName(record.header.key, record.sequence)) return RecordError("name does not match the key");
  return record;
}

}  // namespace ashlar::storage
