// SPDX-License-Identifier: Apache-2.0
#include "proto/byte_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ashlar {
namespace {

using ::testing::HasSubstr;

TEST(ByteSize, AcceptsUnitsInAnyCase) {
  const struct {
    const char* text;
    uint64_t bytes;
  } sizes[] = {{"0", 0},
               {"4096", 4096},
               {"4096B", 4096},
               {"1KiB", 1024},
               {"1k", 1024},
               {"1Ki", 1024},
               {"1kB", 1000},
               {"1KB", 1000},
               {"64GiB", uint64_t{64} << 30},
               {"64 GiB", uint64_t{64} << 30},
               {"64gib", uint64_t{64} << 30},
               {"64g", uint64_t{64} << 30},
               {"64Gi", uint64_t{64} << 30},
               {"64GB", 64'000'000'000},
               {"1.5g", 1'610'612'736},
               {"1.5GB", 1'500'000'000},
               {"0.1KiB", 102},
               {"2TB", 2'000'000'000'000},
               {"3PiB", uint64_t{3} << 50},
               {"18446744073709551615", UINT64_MAX}};
  for (const auto& size : sizes) {
    const absl::StatusOr<uint64_t> bytes = ParseByteSize(size.text);
    ASSERT_TRUE(bytes.ok()) << size.text << ": " << bytes.status();
    EXPECT_EQ(*bytes, size.bytes) << size.text;
  }
}

TEST(ByteSize, RefusesEverythingElseAndShowsIt) {
  for (const char* text : {"", " 1", "GiB", "-1", "+1", "1e3", "1.GiB", ".5G", "1.5.5G", "1 2", "1Gb/s", "1GX", "0x10",
                           "1iB", "1bi", "infinity", "1.1234567890123456789G"}) {
    const absl::Status status = ParseByteSize(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("\"") + text + "\" is not a size; expected"));
  }
  for (const char* text : {"18446744073709551616", "16777216TiB", "99999999999999999999999GB"}) {
    EXPECT_THAT(std::string(ParseByteSize(text).status().message()), HasSubstr("is out of range")) << text;
  }
}

}  // namespace
}  // namespace ashlar
