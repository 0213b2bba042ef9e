// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/corrupt.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

namespace ashlar::integration {

int FlipInArenas(pid_t daemon, const std::string& pattern) {
  const std::string proc = "/proc/" + std::to_string(daemon);
  const int memory = ::open((proc + "/mem").c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_GE(memory, 0);
  int found = 0;
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:ashlar-arena") == std::string::npos) continue;
    unsigned long begin = 0, end = 0;
    EXPECT_EQ(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end), 2);
    std::string bytes(end - begin, '\0');
    if (::pread(memory, bytes.data(), bytes.size(), static_cast<off_t>(begin)) != static_cast<ssize_t>(bytes.size())) {
      continue;
    }
    for (size_t at = bytes.find(pattern); at != std::string::npos; at = bytes.find(pattern, at + 1)) {
      const char flipped = static_cast<char>(bytes[at] ^ 0x10);
      EXPECT_EQ(::pwrite(memory, &flipped, 1, static_cast<off_t>(begin + at)), 1);
      ++found;
    }
  }
  ::close(memory);
  return found;
}

}  // namespace ashlar::integration
