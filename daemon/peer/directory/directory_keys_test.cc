// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_keys.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/hex.h"

namespace ashlar::daemon {
namespace {

TEST(DirectoryKeys, BytesMatchTheFormat) {
  const DirectoryKeys keys("/ashlar", "east");
  EXPECT_EQ(keys.MemberKey(0x0102030405060708), std::string("/ashlar/east/m\x01\x02\x03\x04\x05\x06\x07\x08"));
  EntryId id;
  id.ns.fill(0xaa);
  id.key.fill(0xbb);
  id.rank = 2;
  id.last_rank = 7;
  EXPECT_EQ(keys.EntryKey(id, 0x0102030405060708),
            absl::StrCat("/ashlar/east/e", std::string(16, '\xaa'), std::string(16, '\xbb'),
                         "\x01\x02\x03\x04\x05\x06\x07\x08\x02\x07"));
  const Holding holding = {
      .tier = TierKind::kSsd, .kind = ObjectKind::kSpan, .shard = {2, 8}, .bytes = 300, .depth = 5, .span_begin = 4};
  EXPECT_EQ(absl::BytesToHexString(EncodeHolding(holding)), "0143ac020504");
  EXPECT_EQ(DecodeHolding(EncodeHolding(holding), id), holding);
  EXPECT_EQ(DecodeHolding(EncodeHolding(holding) + "later", id), holding) << "what later builds add is ignored";
}

TEST(DirectoryKeys, EntriesNameTheGpuAndOlderEntriesStayValid) {
  Holding holding = {.tier = TierKind::kHbm, .kind = ObjectKind::kSegment, .bytes = 300};
  const std::string older = BytesOfHex("0111ac020000");
  EXPECT_EQ(EncodeHolding(holding), older) << "where no GPU is named, the bytes of a build that names none";
  EXPECT_EQ(DecodeHolding(older, {}), holding);
  holding.gpu = 0;
  EXPECT_EQ(absl::BytesToHexString(EncodeHolding(holding)), "0111ac02000001");
  EXPECT_EQ(DecodeHolding(EncodeHolding(holding), {}), holding);
  EXPECT_EQ(DecodeHolding(EncodeHolding(holding) + "later", {}), holding);
  // A build that does not know GPUs reads its known fields, which come first, and ignores the rest.
  EXPECT_EQ(EncodeHolding(holding).substr(0, older.size()), older);
  holding.gpu = Holding::kMostGpus - 1;
  EXPECT_EQ(DecodeHolding(EncodeHolding(holding), {}), holding);
  // Only a copy in hbm is on a GPU.
  EXPECT_EQ(DecodeHolding(BytesOfHex("0112ac02000005"), {})->gpu, std::nullopt);
  EXPECT_EQ(DecodeHolding(BytesOfHex("0111ac02000000"), {})->gpu, std::nullopt) << "it says that none is";
}

TEST(DirectoryKeys, AnyEntryReadsBack) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const DirectoryKeys keys("/a/b", "c");
  for (int i = 0; i < 1000; ++i) {
    EntryId id;
    for (uint8_t& byte : id.ns) byte = static_cast<uint8_t>(random());
    for (uint8_t& byte : id.key) byte = static_cast<uint8_t>(random());
    id.last_rank = static_cast<uint8_t>(random());
    id.rank = static_cast<uint8_t>(random() % (id.last_rank + 1));
    const uint64_t incarnation = random();
    const auto entry = keys.ReadEntry(keys.EntryKey(id, incarnation));
    ASSERT_TRUE(entry.has_value());
    EXPECT_EQ(entry->id, id);
    EXPECT_EQ(entry->incarnation, incarnation);
    EXPECT_EQ(keys.ReadMember(keys.MemberKey(incarnation)), incarnation);
    Holding holding = {.tier = static_cast<TierKind>(1 + random() % 3),
                       .kind = static_cast<ObjectKind>(1 + random() % 4),
                       .shard = {id.rank, id.last_rank + 1u},
                       .bytes = random() >> (24 + random() % 40),
                       .depth = static_cast<uint32_t>(random() >> random() % 64),
                       .span_begin = static_cast<uint32_t>(random())};
    const std::string value = EncodeHolding(holding);
    if (holding.tier == TierKind::kHbm && random() % 2) {
      holding.gpu = static_cast<uint8_t>(random() % Holding::kMostGpus);
      EXPECT_EQ(DecodeHolding(EncodeHolding(holding), id), holding);
      holding.gpu.reset();
    }
    EXPECT_EQ(DecodeHolding(value, id), holding);
    for (size_t size = 0; size < value.size(); ++size) EXPECT_FALSE(DecodeHolding(value.substr(0, size), id)) << size;
    const Member member = {absl::StrCat("n", random()),        incarnation, "a:1", "b:2", "3",
                           static_cast<int64_t>(random() >> 1)};
    EXPECT_EQ(DecodeMember(EncodeMember(member), incarnation), member);
  }
}

TEST(DirectoryKeys, AnyBytesAreReadOrRefused) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const DirectoryKeys keys("/a", "c");
  for (int i = 0; i < 100000; ++i) {
    std::string bytes(random() % 20, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (!bytes.empty() && random() % 2) bytes[0] = 1;
    const EntryId id = {.rank = static_cast<uint8_t>(random() % 3), .last_rank = 1};
    if (const auto holding = DecodeHolding(bytes, id)) {
      EXPECT_EQ(DecodeHolding(EncodeHolding(*holding), id), holding);
      EXPECT_LT(holding->shard.rank, 2u);
      EXPECT_LE(holding->bytes, kMostHoldingBytes);
    }
    DecodeMember(bytes, 1);
    if (const auto erasure = DecodeErasure(bytes)) {
      EXPECT_EQ(DecodeErasure(EncodeErasure(*erasure)), erasure);
      EXPECT_FALSE(erasure->tenant.empty());
    }
    EXPECT_FALSE(keys.ReadErasure(bytes));
    EXPECT_FALSE(keys.ReadEntry(bytes));
    EXPECT_FALSE(keys.ReadMember(bytes));
  }
  EXPECT_FALSE(DecodeHolding(std::string("\x02\x11\x00\x00\x00", 5), {})) << "another format";
  EXPECT_FALSE(DecodeHolding(std::string("\x01\x14\x00\x00\x00", 5), {})) << "the remote tier is no holder's";
  EXPECT_FALSE(DecodeMember("", 1)) << "no name";
}

TEST(DirectoryKeys, ErasuresAreReadBack) {
  const DirectoryKeys keys("/a", "c");
  ClusterErasure erasure{.tenant = "t", .node = "n"};
  erasure.id.fill(0xfe);
  const std::string key = keys.ErasureKey(erasure.id);
  EXPECT_EQ(keys.ReadErasure(key), erasure.id);
  EXPECT_FALSE(keys.ReadErasure(key + "x"));
  EXPECT_FALSE(keys.ReadErasure(keys.MemberKey(1)));
  EXPECT_FALSE(keys.ReadMember(key));
  EXPECT_FALSE(keys.ReadEntry(key));
  auto read = DecodeErasure(EncodeErasure(erasure));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->tenant, "t");
  EXPECT_EQ(read->node, "n");
  EXPECT_FALSE(read->ns.has_value());
  erasure.ns.emplace().bytes.fill(7);
  read = DecodeErasure(EncodeErasure(erasure));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->ns, erasure.ns);
  EXPECT_FALSE(DecodeErasure(std::string("\x0a\x01t\x12\x01n", 6))) << "a namespace of one byte";
  EXPECT_FALSE(DecodeErasure("")) << "no tenant";
}

TEST(DirectoryKeys, SlicesCoverANamespaceOnce) {
  const DirectoryKeys keys("/a", "c");
  ShortDigest ns;
  ns.fill(0xff);
  ns[0] = 7;
  for (const uint32_t slices : {1u, 2u, 256u, 512u, 65536u}) {
    std::string from = keys.EntriesOf(ns);
    uint32_t count = 0;
    for (; from != RangeEnd(keys.EntriesOf(ns)); ++count) {
      const auto end = keys.SliceEnd(from, slices);
      ASSERT_TRUE(end.has_value());
      ASSERT_GT(*end, from);
      EXPECT_EQ(keys.SliceEnd(from + std::string(3, '\0'), slices), end) << "from within a slice, to its end";
      from = *end;
    }
    EXPECT_EQ(count, slices);
  }
  EXPECT_FALSE(keys.SliceEnd(keys.Entries() + "short", 1).has_value());
  EXPECT_EQ(SlicesFor(0), 1u);
  EXPECT_EQ(SlicesFor(1000000), 512u);
  EXPECT_EQ(SlicesFor(INT64_MAX), 65536u);
}

TEST(DirectoryKeys, RangesEndBehindTheirPrefix) {
  EXPECT_EQ(RangeEnd("ab"), "ac");
  EXPECT_EQ(RangeEnd("a\xff\xff"), "b");
  EXPECT_EQ(RangeEnd("\xff"), std::string(1, '\0'));
}

}  // namespace
}  // namespace ashlar::daemon
