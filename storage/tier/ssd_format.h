// SPDX-License-Identifier: Apache-2.0
// SsdRecord, and the encodings by which the SSD tier finds its objects again (docs/formats.md).
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

// The version of slab, manifest and records together: all three change with it.
inline constexpr uint32_t kSsdFormatVersion = 2;

// Slab and records carry the same name, drawn when they were made: neither is ever read with another's.
using SlabId = std::array<uint8_t, 16>;

// The manifest: the record by this name, which sorts before all others.
inline constexpr std::string_view kManifestName = "manifest";
std::string EncodeManifest(const SlabId& id);
// DATA_LOSS where the bytes are damaged, FAILED_PRECONDITION for another version or size of extents.
absl::StatusOr<SlabId> DecodeManifest(std::string_view bytes);

// The first bytes of a slab. As above; NOT_FOUND where there are zeros only, as in a new file.
std::string EncodeSlabHeader(const SlabId& id);
inline constexpr size_t kSlabHeaderBytes = 40;
absl::StatusOr<SlabId> DecodeSlabHeader(std::string_view bytes);

// One committed object.
struct SsdRecord {
  uint64_t sequence = 0;  // of two records that claim the same, the one with the greater number is right
  std::string tenant;
  PoolKind pool = PoolKind::kPublic;
  std::vector<ExtentRun> runs;  // in the slab; `arena` is 0
  ObjectHeader header;
};
std::string RecordName(const Key& key, uint64_t sequence);
std::string EncodeRecord(const SsdRecord& record);
// DATA_LOSS naming what is wrong: damaged bytes, a name that is not the record's, extents that are not the object's.
absl::StatusOr<SsdRecord> DecodeRecord(std::string_view name, std::string_view bytes);

}  // namespace ashlar::storage
