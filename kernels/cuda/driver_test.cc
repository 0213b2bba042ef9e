// Finding the driver's calls in a library. No GPU is needed: CUDA's toolkit has a library of stubs with all names.
#include "kernels/cuda/driver.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/cuda/device_arena.h"

namespace ashlar::kernels::cuda {
namespace {

// First, for the stubs below call themselves by the driver's name.
TEST(Driver, OfThisMachineMakesArenasOrIsNone) {
  const Driver* driver = SystemDriver();
  if (driver == nullptr) GTEST_SKIP() << "this machine has no driver";
  ArenaError error;
  const auto arena = DeviceArena::Make(*driver, 0, 1, &error);
  if (arena == nullptr) GTEST_SKIP() << "no GPU that can: " << error.message;
  EXPECT_GE(arena->bytes(), 1u);
  EXPECT_GE(arena->descriptor(), 0);
  const auto again =
      DeviceArena::Import(*driver, 0, arena->descriptor(), arena->bytes(), DeviceArena::Access::kReadWrite, &error);
  EXPECT_NE(again, nullptr) << error.message;
}

TEST(Driver, IsNoneWithoutItsLibraryOrCalls) {
  EXPECT_FALSE(LoadDriver("libcuda-of-nobody.so.1").has_value());
  EXPECT_FALSE(LoadDriver("libc.so.6").has_value()) << "a library that lacks the calls";
}

TEST(Driver, IsFoundByItsCalls) {
  if (!std::filesystem::exists(STUB_DRIVER)) GTEST_SKIP() << "CUDA's library of stubs is not installed";
  const std::optional<Driver> driver = LoadDriver(STUB_DRIVER);
  ASSERT_TRUE(driver.has_value());
  ArenaError error;
  EXPECT_EQ(DeviceArena::Make(*driver, 0, 1, &error), nullptr);
  EXPECT_EQ(error.message.rfind("cuInit: ", 0), 0u) << error.message;
}

}  // namespace
}  // namespace ashlar::kernels::cuda
