// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/testing/directory_fixture.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace ashlar::daemon {

// Not a test: the program of a NodeProcess.
TEST(NodeProcess, RunsUntilItIsKilled) {
  const char* const endpoint = std::getenv("ASHLAR_NODE_ENDPOINT");
  if (endpoint == nullptr) GTEST_SKIP() << "other tests start it";
  Node node(std::getenv("ASHLAR_NODE_NAME"), OptionsFor(endpoint));
  const uint64_t first = std::strtoull(std::getenv("ASHLAR_NODE_FIRST"), nullptr, 10);
  const uint64_t count = std::strtoull(std::getenv("ASHLAR_NODE_COUNT"), nullptr, 10);
  const uint64_t spaces = std::strtoull(std::getenv("ASHLAR_NODE_SPACES"), nullptr, 10);
  for (uint64_t key = first; key < first + count; ++key) node.Hold(1 + key % spaces, key);
  for (;;) ::pause();
}

std::string Shell(const std::string& command) {
  std::string output;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  for (int c = 0; (c = std::fgetc(pipe)) != EOF;) output.push_back(static_cast<char>(c));
  const int status = ::pclose(pipe);
  EXPECT_EQ(status, 0) << command << "\n" << output;
  return output;
}

}  // namespace ashlar::daemon
