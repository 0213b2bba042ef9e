// SPDX-License-Identifier: Apache-2.0
// An entry of the cluster's directory, which any node may have written: a key, and an object that is held or an
// erasure.
#include "daemon/peer/directory/directory_keys.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  using namespace ashlar::daemon;
  const DirectoryKeys keys("/p", "c");
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t key_size = keys.EntryKey({}, 0).size();
  const absl::string_view key = bytes.substr(0, key_size), value = bytes.substr(key.size());
  keys.ReadMember(key);
  const std::optional<ClusterErasure> erasure = DecodeErasure(bytes);
  if (erasure.has_value()) FUZZ_EXPECT(DecodeErasure(EncodeErasure(*erasure)) == erasure);
  const std::optional<ClusterErasure::Id> id = keys.ReadErasure(bytes);
  if (id.has_value()) FUZZ_EXPECT(keys.ErasureKey(*id) == bytes);
  const std::optional<DirectoryKeys::Entry> entry = keys.ReadEntry(key);
  if (!entry.has_value()) return 0;
  FUZZ_EXPECT(keys.EntryKey(entry->id, entry->incarnation) == key);
  const std::optional<Holding> holding = DecodeHolding(value, entry->id);
  if (holding.has_value()) {
    FUZZ_EXPECT(holding->shard.rank < holding->shard.size);
    FUZZ_EXPECT(holding->bytes <= kMostHoldingBytes);
    FUZZ_EXPECT(DecodeHolding(EncodeHolding(*holding), entry->id) == holding);
  }
  const std::optional<Member> member = DecodeMember(value, 1);
  if (member.has_value()) FUZZ_EXPECT(DecodeMember(EncodeMember(*member), 1) == member);
  return 0;
}
