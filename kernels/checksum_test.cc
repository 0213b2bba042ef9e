// SPDX-License-Identifier: Apache-2.0
#include "kernels/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/testing/backends.h"
#include "kernels/testing/random.h"

// xxHash's own portable implementation, in this file only: the reference for UnitChecksum.
#define XXH_INLINE_ALL
#define XXH_VECTOR 0
#include <xxhash.h>

namespace ashlar::kernels::testing {
namespace {

TEST(UnitChecksum, IsXxh3) {
  EXPECT_EQ(UnitChecksum("", 0), 0x2d06800538d394c2u);
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const std::vector<float> data = random.Normals(300'000);
  const auto* bytes = reinterpret_cast<const char*>(data.data());
  for (size_t size = 0; size < 2100; ++size) ASSERT_EQ(UnitChecksum(bytes, size), XXH3_64bits(bytes, size)) << size;
  for (int i = 0; i < 50; ++i) {
    const auto offset = static_cast<size_t>(random.Integer(0, 100));
    const auto size = static_cast<size_t>(random.Integer(0, 1'000'000));
    ASSERT_EQ(UnitChecksum(bytes + offset, size), XXH3_64bits(bytes + offset, size)) << offset << " " << size;
  }
}

TEST(CombineChecksums, HashesWordsInOrder) {
  const uint64_t words[] = {1, 2, 3}, swapped[] = {2, 1, 3};
  EXPECT_EQ(CombineChecksums(words), XXH3_64bits(words, sizeof(words)));
  EXPECT_NE(CombineChecksums(words), CombineChecksums(swapped));
  EXPECT_NE(CombineChecksums({words, 2}), CombineChecksums(words));
}

class ChecksumTest : public ::testing::TestWithParam<Backend> {
 protected:
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{GetParam()};
};

// `count` units of random bytes, the last one shorter.
struct ByteUnits {
  ByteUnits(Random& random, size_t count, size_t unit_bytes, size_t last_bytes) {
    for (size_t i = 0; i < count; ++i) {
      std::vector<uint8_t>& unit = units.emplace_back(i + 1 == count ? last_bytes : unit_bytes);
      for (uint8_t& byte : unit) byte = static_cast<uint8_t>(random.Integer(0, 255));
    }
    for (std::vector<uint8_t>& unit : units) pointers.push_back(unit.data());
  }

  std::vector<std::vector<uint8_t>> units;
  std::vector<void*> pointers;
};

TEST_P(ChecksumTest, HashesAndCopies) {
  const std::pair<size_t, size_t> sizes[] = {{1, 1}, {7, 3}, {240, 240}, {241, 1}, {4096, 100}, {300'001, 70'000}};
  for (const auto& [unit_bytes, last_bytes] : sizes) {
    for (const size_t count : {size_t{1}, size_t{5}}) {
      SCOPED_TRACE(std::to_string(count) + " units of " + std::to_string(unit_bytes) + ", " +
                   std::to_string(last_bytes));
      ByteUnits source(random_, count, unit_bytes, last_bytes), target(random_, count, unit_bytes, last_bytes);
      std::vector<uint64_t> checksums(count), expected;
      for (const auto& unit : source.units) expected.push_back(XXH3_64bits(unit.data(), unit.size()));
      ChecksumArgs args = {.units = {source.pointers.data(), count},
                           .unit_bytes = unit_bytes,
                           .last_unit_bytes = last_bytes,
                           .unit_checksums = checksums.data()};
      runner_.Run(args);
      EXPECT_EQ(checksums, expected);
      for (const int64_t batch_bytes : {int64_t{0}, int64_t{1} << 30}) {
        checksums.assign(count, 0);
        for (auto& unit : target.units) std::ranges::fill(unit, uint8_t{0});
        args.target = target.pointers.data();
        args.batch_bytes = batch_bytes;
        runner_.Run(args);
        EXPECT_EQ(checksums, expected);
        EXPECT_EQ(target.units, source.units);
      }
    }
  }
}

TEST_P(ChecksumTest, SeesEveryFlippedBit) {
  ByteUnits source(random_, 3, 5000, 777);
  const auto hash = [&] {
    std::vector<uint64_t> checksums(3);
    runner_.Run(ChecksumArgs{.units = {source.pointers.data(), 3},
                             .unit_bytes = 5000,
                             .last_unit_bytes = 777,
                             .unit_checksums = checksums.data()});
    return checksums;
  };
  const std::vector<uint64_t> intact = hash();
  for (int i = 0; i < 100; ++i) {
    const auto unit = static_cast<size_t>(random_.Integer(0, 2));
    uint8_t& byte = source.units[unit][random_.Integer(0, source.units[unit].size() - 1)];
    const auto mask = static_cast<uint8_t>(1 << random_.Integer(0, 7));
    byte ^= mask;
    const std::vector<uint64_t> flipped = hash();
    byte ^= mask;
    for (size_t u = 0; u < 3; ++u) EXPECT_EQ(flipped[u] != intact[u], u == unit);
    EXPECT_NE(CombineChecksums(flipped), CombineChecksums(intact));
  }
  EXPECT_EQ(hash(), intact);
}

INSTANTIATE_TEST_SUITE_P(Backends, ChecksumTest, ::testing::ValuesIn(Backends()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace ashlar::kernels::testing
