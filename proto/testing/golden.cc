// SPDX-License-Identifier: Apache-2.0
#include "proto/testing/golden.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "absl/strings/escaping.h"

namespace ashlar {
namespace {

constexpr size_t kLineBytes = 32;

}  // namespace

void ExpectGolden(const std::string& name, absl::string_view bytes) {
  const std::string path = std::string(ASHLAR_TESTDATA) + "/" + name + ".hex";
  std::string hex;  // wrapped, so that a change shows as the lines that changed
  for (size_t i = 0; i < bytes.size(); i += kLineBytes) {
    hex += absl::BytesToHexString(bytes.substr(i, kLineBytes)) + "\n";
  }
  if (std::getenv("ASHLAR_REGENERATE_GOLDEN") != nullptr) {
    std::ofstream(path) << hex;
    FAIL() << "wrote " << path << ": look at the difference, then run again without ASHLAR_REGENERATE_GOLDEN";
  }
  std::ifstream file(path);
  ASSERT_TRUE(file) << path << " is missing";
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), hex) << path;
}

}  // namespace ashlar
