// SPDX-License-Identifier: Apache-2.0
// Finding the driver's calls in a library. No GPU is needed: CUDA's toolkit has a library of stubs with all names.
#include "kernels/cuda/driver.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "kernels/cuda/device_arena.h"

namespace ashlar::kernels::cuda {
namespace {

TEST(Driver, IsAbsentWithoutItsLibraryOrCalls) {
  EXPECT_FALSE(LoadDriver("libcuda-of-nobody.so.1").has_value());
  EXPECT_FALSE(LoadDriver("libc.so.6").has_value()) << "a library that lacks the calls";
}

// In a separate process: the stubs are named like the driver, and a loaded library is found again.
TEST(Driver, IsFoundByItsCalls) {
  if (!std::filesystem::exists(STUB_DRIVER)) GTEST_SKIP() << "CUDA's library of stubs is not installed";
  const auto ask = [] {
    const std::optional<Driver> driver = LoadDriver(STUB_DRIVER);
    ArenaError error;
    if (!driver || DeviceArena::Make(*driver, 0, 1, &error) != nullptr) std::exit(1);
    std::fprintf(stderr, "%s\n", error.message.c_str());
    std::exit(0);
  };
  EXPECT_EXIT(ask(), ::testing::ExitedWithCode(0), "^cuInit: ");
}

}  // namespace
}  // namespace ashlar::kernels::cuda
