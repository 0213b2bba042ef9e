// SPDX-License-Identifier: Apache-2.0
// Replaces libFuzzer where it is not installed: runs a target over the files of folders, whole and truncated at every
// length.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  size_t inputs = 0;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (size_t size = 0; size <= bytes.size(); ++size, ++inputs) {
      const std::vector<uint8_t> exact(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      LLVMFuzzerTestOneInput(exact.data(), size);
    }
  }
  std::printf("%zu files, %zu inputs\n", files.size(), inputs);
  return files.empty() ? 1 : 0;  // a missing corpus tests nothing
}
