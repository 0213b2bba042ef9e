// SPDX-License-Identifier: Apache-2.0
// Arenas in the memory of the emulated GPU. Its driver is a table of functions like CUDA's, so every call can be made
// to fail. A CPU thread that touches its memory gets a fatal signal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_arena.h"
#include "kernels/cuda/emulator/driver.h"
#include "kernels/gpu.h"

namespace ashlar::kernels::cuda {
namespace {

using emulator::Alive;
using emulator::EmulatedDriver;
using emulator::kGranularity;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Access = DeviceArena::Access;

class FarArenas : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(Alive(), emulator::DriverObjects{});
    emulator::TakeCalls();
  }
  void TearDown() override {
    emulator::SetFault(nullptr);
    emulator::LackAttribute(0);
    EXPECT_EQ(Alive(), emulator::DriverObjects{});
  }
  static std::unique_ptr<DeviceArena> Make(uint64_t bytes, ArenaError* error) {
    return DeviceArena::Make(EmulatedDriver(), 0, bytes, error);
  }

  ArenaError error_;
};

// Each call in turn is refused: the error names it and the reason, and nothing leaks.
void EveryCallMayFail(const std::function<std::unique_ptr<DeviceArena>(ArenaError*)>& make, size_t refusable) {
  const auto before = Alive();
  emulator::TakeCalls();
  ArenaError error;
  ASSERT_NE(make(&error), nullptr) << error.message;
  std::vector<std::string> calls = emulator::TakeCalls();
  calls.erase(std::find(calls.begin(), calls.end(), "cuMemRelease"), calls.end());  // by then everything is created
  const int lowest = dup(0);  // the number that a leaked descriptor would have
  ASSERT_GE(lowest, 0);
  close(lowest);
  size_t refused = 0;
  for (size_t n = 0; n < calls.size(); ++n) {
    SCOPED_TRACE(calls[n]);
    for (const CUresult code : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_SUPPORTED}) {
      const emulator::Fault fault{.countdown = static_cast<int>(n), .code = code};
      emulator::SetFault(&fault);
      const auto arena = make(&error);
      if (arena != nullptr) continue;  // it can do without: GPU-direct RDMA
      ++refused;
      const char* name = code == CUDA_ERROR_OUT_OF_MEMORY ? "OUT_OF_MEMORY" : "NOT_SUPPORTED";
      EXPECT_THAT(error.message, StartsWith(calls[n] + ": CUDA_ERROR_" + name));
      EXPECT_EQ(error.out_of_memory, code == CUDA_ERROR_OUT_OF_MEMORY);
      EXPECT_EQ(Alive(), before);
      const int next = dup(0);
      EXPECT_EQ(next, lowest) << "a descriptor was left open";
      close(next);
    }
  }
  EXPECT_EQ(refused, 2 * refusable);
}

TEST_F(FarArenas, AFailedCallLeavesNothingBehind) {
  // cuInit, cuDeviceGet, two required attributes and one optional, granularity, create, reserve, map, access, export.
  EveryCallMayFail([](ArenaError* error) { return Make(5 << 20, error); }, 10);
}

TEST_F(FarArenas, AFailedImportLeavesNothingBehind) {
  const auto owner = Make(kGranularity, &error_);
  ASSERT_NE(owner, nullptr);
  EveryCallMayFail(
      [&](ArenaError* error) {
        return DeviceArena::Import(EmulatedDriver(), 0, owner->descriptor(), owner->bytes(), Access::kRead, error);
      },
      8);
}

TEST_F(FarArenas, EndInTheOppositeOrder) {
  {
    const auto arena = Make(kGranularity, &error_);
    ASSERT_NE(arena, nullptr);
    EXPECT_EQ(Alive(), (emulator::DriverObjects{.handles = 0, .ranges = 1, .mappings = 1})) << "the mapping holds it";
    emulator::TakeCalls();
  }
  EXPECT_THAT(emulator::TakeCalls(), ElementsAre("cuMemUnmap", "cuMemAddressFree"));
}

TEST_F(FarArenas, AnUnsupportedDeviceIsNamed) {
  emulator::LackAttribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  EXPECT_EQ(Make(1, &error_), nullptr);
  EXPECT_EQ(error_.message, "device 0 has no virtual memory management");
  EXPECT_FALSE(error_.out_of_memory);
  emulator::LackAttribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  EXPECT_EQ(Make(1, &error_), nullptr);
  EXPECT_EQ(error_.message, "device 0 has no sharing by file descriptors");
  emulator::LackAttribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  EXPECT_NE(Make(1, &error_), nullptr) << "what networks want is not needed here";
  emulator::LackAttribute(0);
  EXPECT_EQ(DeviceArena::Make(EmulatedDriver(), 7, 1, &error_), nullptr);
  EXPECT_THAT(error_.message, StartsWith("cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"));
}

TEST_F(FarArenas, OtherMemoryThanArenasIsNotImported) {
  const auto import = [&](int descriptor, uint64_t bytes) {
    return DeviceArena::Import(EmulatedDriver(), 0, descriptor, bytes, Access::kReadWrite, &error_);
  };
  EXPECT_EQ(import(-1, kGranularity), nullptr);
  EXPECT_THAT(error_.message, HasSubstr("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"));
  const auto owner = Make(kGranularity, &error_);
  EXPECT_EQ(import(owner->descriptor(), 2 * kGranularity), nullptr) << "more than there is";
  EXPECT_THAT(error_.message, HasSubstr("cuMemMap: CUDA_ERROR_INVALID_VALUE"));
  EXPECT_EQ(import(owner->descriptor(), kGranularity - 1), nullptr);
  EXPECT_THAT(error_.message, HasSubstr("cuMemAddressReserve: CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(FarArenas, AnotherProcessWritesThere) {
  DeviceMemory& memory = *CudaOrNull()->memory();
  std::vector<uint16_t> numbers(kGranularity / 2);
  std::iota(numbers.begin(), numbers.end(), 4711);
  const auto owner = Make(kGranularity, &error_);
  ASSERT_NE(owner, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto there =
        DeviceArena::Import(EmulatedDriver(), 0, owner->descriptor(), owner->bytes(), Access::kReadWrite, &error_);
    if (there != nullptr) memory.CopyToDevice(there->data(), numbers.data(), kGranularity);
    _exit(there != nullptr ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::vector<uint16_t> found(numbers.size());
  memory.CopyToHost(found.data(), owner->data(), kGranularity);
  EXPECT_EQ(found, numbers);
}

// This protection makes a forgotten CPU access visible in other tests.
TEST_F(FarArenas, TheCpuCannotAccessArenas) {
  const auto arena = Make(kGranularity, &error_);
  ASSERT_NE(arena, nullptr);
  volatile std::byte* data = arena->data();
  EXPECT_EXIT(data[0] = std::byte{1}, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(std::exit(static_cast<int>(data[kGranularity - 1])), ::testing::KilledBySignal(SIGSEGV), "");
}

// As on a machine whose GPUs cannot access each other, so that a test of two GPUs shows whose queue was used.
TEST_F(FarArenas, ADeviceCannotAccessAnothersMemory) {
  const auto first = Make(kGranularity, &error_);
  const auto second = DeviceArena::Make(EmulatedDriver(), 1, kGranularity, &error_);
  ASSERT_TRUE(first != nullptr && second != nullptr) << error_.message;
  EXPECT_EQ(DeviceArena::Import(EmulatedDriver(), 1, first->descriptor(), kGranularity, Access::kReadWrite, &error_),
            nullptr);
  EXPECT_THAT(error_.message, HasSubstr("cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE"));
  std::string why;
  const Gpu *const one = FindGpu(0, &why), *const other = FindGpu(1, &why);
  ASSERT_TRUE(one != nullptr && other != nullptr) << why;
  EXPECT_NE(one->id(), other->id());
  char byte = 'a';
  other->CopyToDevice(second->data(), &byte, 1);
  one->CopyToDevice(first->data(), &byte, 1);
  EXPECT_EXIT(other->CopyToHost(&byte, first->data(), 1), ::testing::KilledBySignal(SIGSEGV), "");
  one->Enter();  // as other tests expect it
}

// Memory that is imported read-only cannot be written by copies either.
TEST_F(FarArenas, ReadOnlyMemoryCannotBeWritten) {
  const auto owner = Make(kGranularity, &error_);
  ASSERT_NE(owner, nullptr);
  const auto reader =
      DeviceArena::Import(EmulatedDriver(), 0, owner->descriptor(), owner->bytes(), Access::kRead, &error_);
  ASSERT_NE(reader, nullptr);
  EXPECT_EXIT(CudaOrNull()->memory()->CopyToDevice(reader->data(), "a", 1), ::testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace ashlar::kernels::cuda
