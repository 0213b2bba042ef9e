// SPDX-License-Identifier: Apache-2.0
// The bytes that the SSD tier reads back from its disk: the manifest, a slab's first bytes, records.
#include <cstring>
#include <string>

#include "kernels/checksum.h"
#include "storage/tier/ssd_format.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar;
using namespace ashlar::storage;

bool Refused(const absl::Status& status) {
  return !status.message().empty() && (absl::IsDataLoss(status) || absl::IsFailedPrecondition(status));
}

// Returns the record name that these bytes imply; empty if they are too short.
std::string NameIn(const std::string& bytes) {
  constexpr size_t kSequence = 16, kTenantBytes = 12, kRuns = 24, kTenant = 32,
                   kKeyInHeader = 64;  // offset in docs/formats.md
  uint32_t tenant_bytes, runs;
  uint64_t sequence;
  if (bytes.size() < kTenant) return "";
  std::memcpy(&tenant_bytes, bytes.data() + kTenantBytes, sizeof tenant_bytes);
  std::memcpy(&sequence, bytes.data() + kSequence, sizeof sequence);
  std::memcpy(&runs, bytes.data() + kRuns, sizeof runs);
  Key key;
  const uint64_t at = kTenant + uint64_t{tenant_bytes} + 8 * uint64_t{runs} + kKeyInHeader;
  if (at + key.bytes.size() > bytes.size()) return "";
  std::memcpy(key.bytes.data(), bytes.data() + at, key.bytes.size());
  return RecordName(key, sequence);
}

void Check(const std::string& bytes) {
  const auto manifest = DecodeManifest(bytes);
  FUZZ_EXPECT(manifest.ok() ? EncodeManifest(*manifest) == bytes : Refused(manifest.status()));
  const auto slab = DecodeSlabHeader(bytes);
  const bool zeros = bytes.find_first_not_of('\0') == std::string::npos;
  FUZZ_EXPECT(absl::IsNotFound(slab.status()) == zeros);
  if (!zeros) FUZZ_EXPECT(slab.ok() ? EncodeSlabHeader(*slab) == bytes : Refused(slab.status()));

  FUZZ_EXPECT(!DecodeRecord("object/of another", bytes).ok());
  const std::string name = NameIn(bytes);
  const auto record = DecodeRecord(name, bytes);
  if (!record.ok()) return FUZZ_EXPECT(Refused(record.status()));
  FUZZ_EXPECT(EncodeRecord(*record) == bytes);
  uint64_t extents = 0;
  for (const ExtentRun& run : record->runs) extents += run.count;
  FUZZ_EXPECT(extents == record->header.Extents());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  Check(bytes);
  // Appends the checksum that a writer of these bytes would have used, so that mutations pass that check.
  if (size < sizeof(uint64_t)) return 0;
  const size_t body = size - sizeof(uint64_t);
  const uint64_t checksum = kernels::UnitChecksum(bytes.data(), body);
  std::memcpy(bytes.data() + body, &checksum, sizeof checksum);
  Check(bytes);
  return 0;
}
