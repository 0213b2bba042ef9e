// SPDX-License-Identifier: Apache-2.0
// Arenas in the memory of a real GPU and of the emulated one: what both must do.
#include "kernels/cuda/device_arena.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/cuda/cuda.h"

namespace ashlar::kernels::cuda {
namespace {

using Access = DeviceArena::Access;
constexpr uint64_t kBytes = 1 << 20;

class DeviceArenas : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaOrNull() == nullptr || SystemDriver() == nullptr) GTEST_SKIP() << "this machine has no GPU";
  }
  std::unique_ptr<DeviceArena> Make(uint64_t bytes) { return DeviceArena::Make(*SystemDriver(), 0, bytes, &error_); }
  std::unique_ptr<DeviceArena> Import(const DeviceArena& owner, Access access) {
    return DeviceArena::Import(*SystemDriver(), 0, owner.descriptor(), owner.bytes(), access, &error_);
  }

  ArenaError error_;
};

TEST_F(DeviceArenas, SizesAreRoundedUpToTheDevicesGranularity) {
  const auto smallest = Make(1);
  ASSERT_NE(smallest, nullptr) << error_.message;
  const uint64_t unit = smallest->bytes();
  for (const auto& [asked, got] :
       {std::pair{unit - 1, unit}, {unit, unit}, {unit + 1, 2 * unit}, {3 * unit, 3 * unit}}) {
    const auto arena = Make(asked);
    ASSERT_NE(arena, nullptr) << error_.message;
    EXPECT_EQ(arena->bytes(), got);
    EXPECT_EQ(arena->kind(), MemoryKind::kDevice);
    EXPECT_NE(arena->data(), nullptr);
    EXPECT_NE(fcntl(arena->descriptor(), F_GETFD) & FD_CLOEXEC, 0) << "programs that are started do not inherit it";
  }
}

TEST_F(DeviceArenas, TooLargeAnArenaIsNoMemory) {
  EXPECT_EQ(Make(uint64_t{1} << 46), nullptr);
  EXPECT_TRUE(error_.out_of_memory) << error_.message;
  EXPECT_THAT(error_.message, ::testing::HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
}

std::vector<uint16_t> Numbers(size_t count, uint16_t first) {
  std::vector<uint16_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST_F(DeviceArenas, BothSidesReadEachOthersWrites) {
  DeviceMemory& memory = *CudaOrNull()->memory();
  const std::vector<uint16_t> numbers = Numbers(kBytes / 2, 17);
  auto owner = Make(kBytes);
  ASSERT_NE(owner, nullptr) << error_.message;
  const auto reader = Import(*owner, Access::kReadWrite);
  ASSERT_NE(reader, nullptr) << error_.message;
  EXPECT_EQ(reader->descriptor(), -1);
  EXPECT_NE(reader->data(), owner->data());
  memory.CopyToDevice(owner->data(), numbers.data(), kBytes);
  owner = nullptr;  // the reader's mapping keeps the memory
  std::vector<uint16_t> found(numbers.size());
  memory.CopyToHost(found.data(), reader->data(), kBytes);
  EXPECT_EQ(found, numbers);
}

// Not every driver supports read-only access.
TEST_F(DeviceArenas, ReadOnlyAccessIsGrantedOrRefused) {
  const auto owner = Make(kBytes);
  ASSERT_NE(owner, nullptr) << error_.message;
  const auto reader = Import(*owner, Access::kRead);
  if (reader == nullptr) {
    EXPECT_THAT(error_.message, ::testing::StartsWith("cuMemSetAccess: "));
    return;
  }
  const std::vector<uint16_t> numbers = Numbers(100, 3);
  std::vector<uint16_t> found(numbers.size());
  CudaOrNull()->memory()->CopyToDevice(owner->data(), numbers.data(), 200);
  CudaOrNull()->memory()->CopyToHost(found.data(), reader->data(), 200);
  EXPECT_EQ(found, numbers);
}

// Kernels read and write arenas, also those of other processes; rows land from one arena into pages in another.
TEST_F(DeviceArenas, KernelsWorkThere) {
  constexpr int32_t kHeads = 2, kDim = 16, kUnitTokens = 8, kTokens = 40, kPageTokens = 4, kFirst = 3;
  constexpr int64_t kRow = int64_t{kHeads} * kDim;
  const Kernels& kernels = *CudaOrNull();
  DeviceMemory& memory = *kernels.memory();
  const auto stored = Make(kBytes), engines = Make(kBytes);
  ASSERT_TRUE(stored != nullptr && engines != nullptr) << error_.message;
  const auto pages = Import(*engines, Access::kReadWrite);
  ASSERT_NE(pages, nullptr) << error_.message;
  const std::vector<uint16_t> rows = Numbers(kTokens * kRow, 1);
  memory.CopyToDevice(stored->data(), rows.data(), rows.size() * 2);
  std::vector<const void*> units;
  for (int64_t u = 0; u < kTokens / kUnitTokens; ++u) units.push_back(stored->data() + u * kUnitTokens * kRow * 2);
  std::vector<int32_t> table;
  for (int32_t p = 0; p * kPageTokens < kFirst + kTokens; ++p) table.push_back(10 + p * 2);
  auto* checksums = reinterpret_cast<uint64_t*>(stored->data() + kBytes / 2);
  kernels
      .Land({.source = {.units = units.data(),
                        .unit_tokens = kUnitTokens,
                        .tokens = kTokens,
                        .heads = kHeads,
                        .dim = kDim,
                        .dtype = DType::kBF16},
             .target = {.base = pages->data(),
                        .page_stride = kPageTokens * kRow,
                        .token_stride = kRow,
                        .head_stride = kDim,
                        .page_tokens = kPageTokens,
                        .page_table = table.data(),
                        .dtype = DType::kBF16},
             .first_position = kFirst,
             .unit_checksums = checksums},
            *kernels.MakeQueue(nullptr))
      .Wait();
  std::vector<uint64_t> digests(units.size());
  memory.CopyToHost(digests.data(), checksums, digests.size() * sizeof(uint64_t));
  for (size_t u = 0; u < units.size(); ++u) {
    const size_t unit = kUnitTokens * kRow;
    EXPECT_EQ(digests[u], UnitChecksum(rows.data() + u * unit, unit * 2));
  }
  std::vector<uint16_t> row(kRow);
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t at = kFirst + t, slot = int64_t{table[at / kPageTokens]} * kPageTokens + at % kPageTokens;
    memory.CopyToHost(row.data(), engines->data() + slot * kRow * 2, kRow * 2);
    EXPECT_TRUE(std::equal(row.begin(), row.end(), rows.begin() + t * kRow)) << "token " << t;
  }
}

}  // namespace
}  // namespace ashlar::kernels::cuda
