// SPDX-License-Identifier: Apache-2.0
// SsdRecord, and the encodings by which the SSD tier recovers its objects (docs/formats.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/object.h"
#include "storage/ids.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The common version of slab, manifest and records.
inline constexpr uint32_t kSsdFormatVersion = 2;

// Slab and records carry the same random id, so that they are never combined with others.
using SlabId = std::array<uint8_t, 16>;

// The manifest is the record with this name, which sorts first.
inline constexpr std::string_view kManifestName = "manifest";
std::string EncodeManifest(const SlabId& id);
// DATA_LOSS if the bytes are damaged, FAILED_PRECONDITION for another version or extent size.
absl::StatusOr<SlabId> DecodeManifest(std::string_view bytes);

// The first bytes of a slab. Errors as above; NOT_FOUND if all are zero, as in a new file.
std::string EncodeSlabHeader(const SlabId& id);
inline constexpr size_t kSlabHeaderBytes = 40;
absl::StatusOr<SlabId> DecodeSlabHeader(std::string_view bytes);

// One committed object.
struct SsdRecord {
  uint64_t sequence = 0;  // the record with the higher number wins a conflict
  std::string tenant;
  PoolKind pool = PoolKind::kPublic;
  std::vector<ExtentRun> runs;  // places in the slab; `arena` is 0
  ObjectHeader header;
};
std::string RecordName(const Key& key, uint64_t sequence);
std::string EncodeRecord(const SsdRecord& record);
// DATA_LOSS names the error: damaged bytes, a name that does not match the record, extents that do not match the
// object.
absl::StatusOr<SsdRecord> DecodeRecord(std::string_view name, std::string_view bytes);

}  // namespace ashlar::storage
