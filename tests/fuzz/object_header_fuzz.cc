// SPDX-License-Identifier: Apache-2.0
// An object's header, as read from a disk or another node.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <string>

#include "proto/limits.h"
#include "proto/object.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar;

void CheckUnit(const ObjectHeader& header, const Part& part, uint32_t unit) {
  const uint64_t begin = part.UnitOffset(unit), end = begin + part.UnitBytes(unit);
  FUZZ_EXPECT(begin < end && end <= header.bytes);
  FUZZ_EXPECT(begin % limits::kUnitAlignment == 0);
  FUZZ_EXPECT(begin / limits::kExtentBytes == (end - 1) / limits::kExtentBytes);
}

void Check(const std::string& bytes) {
  const absl::StatusOr<ObjectHeader> header = DecodeHeader(bytes);
  if (!header.ok()) return FUZZ_EXPECT(absl::IsDataLoss(header.status()) && !header.status().message().empty());
  FUZZ_EXPECT(VerifyHeader(bytes).ok());
  const std::string encoded = EncodeHeader(*header);
  FUZZ_EXPECT(encoded.size() == EncodedHeaderBytes(header->parts.size()) && encoded.size() <= limits::kExtentBytes);
  FUZZ_EXPECT(bytes.compare(0, encoded.size(), encoded) == 0);
  for (const Part& part : header->parts) {
    FUZZ_EXPECT(header->Find(part.layer, part.form) != nullptr && !header->Layer(part.layer).empty());
    if (part.Empty()) continue;
    for (uint32_t unit : {uint32_t{0}, part.units / 2, part.units - 1}) CheckUnit(*header, part, unit);
  }
}

// Appends the checksum that a writer of these bytes would have used, so that mutations pass that check.
void Repair(std::string& bytes) {
  constexpr size_t kHeaderBytes = 12, kChecksum = 16;  // docs/formats.md §4
  uint32_t size = 0;
  if (bytes.size() < kChecksum + sizeof(uint64_t)) return;
  std::memcpy(&size, bytes.data() + kHeaderBytes, sizeof size);
  if (size > bytes.size() || size < kChecksum + sizeof(uint64_t)) return;
  std::memset(bytes.data() + kChecksum, 0, sizeof(uint64_t));
  const uint64_t checksum = XXH3_64bits(bytes.data(), size);
  std::memcpy(bytes.data() + kChecksum, &checksum, sizeof checksum);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  Check(bytes);
  Repair(bytes);
  Check(bytes);
  return 0;
}
