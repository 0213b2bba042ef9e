// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kernels/checksum.h"
#include "proto/testing/golden.h"
#include "storage/testing/disk_objects.h"

namespace ashlar::storage {
namespace {

using ::testing::HasSubstr;

SlabId ExampleId() {
  SlabId id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(i + 1);
  return id;
}

SsdRecord ExampleRecord() {
  return {.sequence = 7,
          .tenant = "acme",
          .pool = PoolKind::kPrivate,
          .runs = {{.first = 1, .count = 2}, {.first = 9, .count = 1}},
          .header = HeaderOfExtents(42, 3)};
}

TEST(SsdFormat, BytesAreTheGoldenOnes) {
  const SsdRecord record = ExampleRecord();
  ExpectGolden("ssd_manifest", EncodeManifest(ExampleId()));
  ExpectGolden("ssd_slab_header", EncodeSlabHeader(ExampleId()));
  ExpectGolden("ssd_record", EncodeRecord(record));
  ExpectGolden("ssd_record_name", RecordName(record.header.key, record.sequence));
  EXPECT_EQ(EncodeSlabHeader(ExampleId()).size(), kSlabHeaderBytes);
}

TEST(SsdFormat, RecordsRoundTrip) {
  const SsdRecord record = ExampleRecord();
  const auto decoded = DecodeRecord(RecordName(record.header.key, record.sequence), EncodeRecord(record));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->sequence, record.sequence);
  EXPECT_EQ(decoded->tenant, record.tenant);
  EXPECT_EQ(decoded->pool, record.pool);
  EXPECT_EQ(decoded->runs, record.runs);
  EXPECT_EQ(decoded->header, record.header);
}

TEST(SsdFormat, AnyChangedByteOfARecordIsFound) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const SsdRecord record = ExampleRecord();
  const std::string name = RecordName(record.header.key, record.sequence);
  const std::string bytes = EncodeRecord(record);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ (1 + random() % 255));
    EXPECT_EQ(DecodeRecord(name, changed).status().code(), absl::StatusCode::kDataLoss) << "byte " << i;
    EXPECT_EQ(DecodeRecord(name, bytes.substr(0, i)).status().code(), absl::StatusCode::kDataLoss) << i << " bytes";
  }
  EXPECT_THAT(DecodeRecord(name + "x", bytes).status().message(), HasSubstr("name"));
  EXPECT_THAT(DecodeRecord(RecordName(record.header.key, 8), bytes).status().message(), HasSubstr("name"));
}

// Invalid records with a valid checksum, which the encoder never produces.
TEST(SsdFormat, RecordsThatAreInvalidAreRefused) {
  const auto refusal = [](const SsdRecord& record) {
    return std::string(
        DecodeRecord(RecordName(record.header.key, record.sequence), EncodeRecord(record)).status().message());
  };
  SsdRecord record = ExampleRecord();
  record.runs = {{.first = 1, .count = 3}, {.first = 9, .count = 0}};
  EXPECT_THAT(refusal(record), HasSubstr("run"));
  record.runs = {{.first = UINT32_MAX, .count = 3}};
  EXPECT_THAT(refusal(record), HasSubstr("run"));
  record.runs = {{.first = 1, .count = 4}};
  EXPECT_THAT(refusal(record), HasSubstr("extents"));
  record.runs = {};
  EXPECT_THAT(refusal(record), HasSubstr("extents"));
  record = ExampleRecord();
  record.pool = static_cast<PoolKind>(2);
  EXPECT_THAT(refusal(record), HasSubstr("pool"));
  record = ExampleRecord();
  record.header.parts[0].units = 0;
  EXPECT_NE(refusal(record), "");
}

// Recomputes the checksum at the end.
void Seal(std::string& bytes) {
  const uint64_t checksum = kernels::UnitChecksum(bytes.data(), bytes.size() - sizeof checksum);
  std::memcpy(bytes.data() + bytes.size() - sizeof checksum, &checksum, sizeof checksum);
}

TEST(SsdFormat, OtherVersionsAreReportedByNumber) {
  EXPECT_EQ(*DecodeManifest(EncodeManifest(ExampleId())), ExampleId());
  EXPECT_EQ(*DecodeSlabHeader(EncodeSlabHeader(ExampleId())), ExampleId());
  for (const uint32_t version : {1u, 3u, 255u}) {
    std::string manifest = EncodeManifest(ExampleId());
    std::memcpy(manifest.data() + 8, &version, sizeof version);
    EXPECT_TRUE(absl::IsDataLoss(DecodeManifest(manifest).status())) << "only the number has changed";
    Seal(manifest);
    const absl::Status status = DecodeManifest(manifest).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("format version " + std::to_string(version)));
    EXPECT_THAT(status.message(), HasSubstr("; expected " + std::to_string(kSsdFormatVersion)));
  }
  // A record's checksum covers the version, so it is recomputed.
  const SsdRecord record = ExampleRecord();
  std::string bytes = EncodeRecord(record);
  bytes[8] = 3;
  const size_t body = bytes.size() - sizeof(uint64_t);
  const uint64_t checksum = kernels::UnitChecksum(bytes.data(), body);
  std::memcpy(bytes.data() + body, &checksum, sizeof checksum);
  const absl::Status status = DecodeRecord(RecordName(record.header.key, record.sequence), bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "ssd record: format version 3; expected 2");
}

// A header whose version and rest are zero, as if the disk lost the rest of a block.
TEST(SsdFormat, AnImpossibleVersionIsDamage) {
  for (const uint32_t version : {0u, 256u, UINT32_MAX}) {
    std::string slab = EncodeSlabHeader(ExampleId());
    std::memcpy(slab.data() + 8, &version, sizeof version);
    Seal(slab);
    EXPECT_TRUE(absl::IsDataLoss(DecodeSlabHeader(slab).status())) << version;
    slab.replace(12, slab.size() - 12, slab.size() - 12, '\0');
    EXPECT_TRUE(absl::IsDataLoss(DecodeSlabHeader(slab).status())) << version;
    std::string manifest = EncodeManifest(ExampleId());
    std::memcpy(manifest.data() + 8, &version, sizeof version);
    manifest.replace(12, manifest.size() - 12, manifest.size() - 12, '\0');
    EXPECT_TRUE(absl::IsDataLoss(DecodeManifest(manifest).status())) << version;
  }
}

TEST(SsdFormat, DamagedHeadersAreNotMistakenForOthers) {
  const std::string manifest = EncodeManifest(ExampleId());
  for (size_t i = 0; i < manifest.size(); ++i) {
    std::string changed = manifest;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(DecodeManifest(changed).ok()) << "byte " << i;
    EXPECT_FALSE(DecodeManifest(manifest.substr(0, i)).ok()) << i << " bytes";
  }
  EXPECT_FALSE(DecodeManifest(manifest + "x").ok());
  EXPECT_EQ(DecodeManifest(EncodeSlabHeader(ExampleId())).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(DecodeSlabHeader(std::string(kSlabHeaderBytes, '\0')).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ashlar::storage
