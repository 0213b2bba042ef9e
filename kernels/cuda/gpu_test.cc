// SPDX-License-Identifier: Apache-2.0
// A GPU whose memory processes share, real or emulated.
#include "kernels/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/checksum.h"

namespace ashlar::kernels {
namespace {

constexpr size_t kCopiedBytes = 1 << 20;

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_ = FindGpu(0, &why_);
    if (gpu_ == nullptr) GTEST_SKIP() << why_;
  }
  const Gpu* gpu_ = nullptr;
  std::string why_;
  ArenaError error_;
};

TEST_F(GpuTest, IsOneForAll) {
  EXPECT_EQ(FindGpu(0, &why_), gpu_);
  EXPECT_EQ(FindGpu(4096, &why_), nullptr);
  EXPECT_THAT(why_, ::testing::ContainsRegex("CUDA shows [0-9]+ GPUs"));
  EXPECT_EQ(FindGpu(-1, &why_), nullptr);
}

// A daemon's work: copies between an engine's arena and CPU memory, hashed on the way. Checksums are also returned in
// CPU memory.
TEST_F(GpuTest, CopiesBetweenGpuAndCpuMemory) {
  gpu_->Enter();
  std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, kCopiedBytes)), std::free);
  std::byte *const source = memory.get(), *const target = source + kCopiedBytes / 4;
  for (size_t i = 0; i < kCopiedBytes / 4; ++i) source[i] = static_cast<std::byte>(i * 7 + i / 251);
  std::memset(target, 0, kCopiedBytes / 4);
  const std::unique_ptr<HostRegistration> registration = gpu_->Register(memory.get(), kCopiedBytes, &error_);
  ASSERT_NE(registration, nullptr) << error_.message;
  const std::unique_ptr<ArenaMemory> arena = gpu_->MakeArena(kCopiedBytes, &error_);
  ASSERT_NE(arena, nullptr) << error_.message;
  const std::unique_ptr<ArenaMemory> engine = gpu_->ImportArena(arena->descriptor(), arena->bytes(), &error_);
  ASSERT_NE(engine, nullptr) << error_.message;
  auto* checksums = reinterpret_cast<uint64_t*>(memory.get() + kCopiedBytes / 2);
  {
    const std::unique_ptr<Queue> queue = gpu_->kernels().MakeQueue(nullptr);
    const auto copy = [&](const void* from, void* to, uint64_t* digest) {
      gpu_->kernels()
          .Checksum({.units = {&from, 1}, .last_unit_bytes = kCopiedBytes / 4, .target = &to, .unit_checksums = digest},
                    *queue)
          .Wait();
    };
    copy(source, engine->data() + kCopiedBytes / 2, checksums);
    copy(arena->data() + kCopiedBytes / 2, target, checksums + 1);
  }
  EXPECT_EQ(std::memcmp(source, target, kCopiedBytes / 4), 0);
  EXPECT_EQ(checksums[0], UnitChecksum(source, kCopiedBytes / 4));
  EXPECT_EQ(checksums[1], checksums[0]);
}

TEST_F(GpuTest, RegisteringTwiceIsRefused) {
  std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, kCopiedBytes)), std::free);
  auto registration = gpu_->Register(memory.get(), kCopiedBytes, &error_);
  ASSERT_NE(registration, nullptr) << error_.message;
  EXPECT_EQ(gpu_->Register(memory.get(), kCopiedBytes, &error_), nullptr);
  EXPECT_THAT(error_.message, ::testing::StartsWith("cudaHostRegister: "));
  EXPECT_FALSE(error_.out_of_memory);
  registration = nullptr;
  EXPECT_NE(gpu_->Register(memory.get(), kCopiedBytes, &error_), nullptr) << error_.message;
}

}  // namespace
}  // namespace ashlar::kernels
