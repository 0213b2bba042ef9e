// SPDX-License-Identifier: Apache-2.0
// The daemon's configuration file.
#include <string>

#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  v1::Config config;
  const absl::Status read = daemon::ParseConfig(std::string(reinterpret_cast<const char*>(data), size), &config);
  if (!read.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(read) && !read.message().empty());
    return 0;
  }
  const std::string effective = daemon::FormatConfig(config);
  v1::Config again;
  FUZZ_EXPECT(daemon::ParseConfig(effective, &again).ok());
  FUZZ_EXPECT(daemon::FormatConfig(again) == effective);
  return 0;
}
