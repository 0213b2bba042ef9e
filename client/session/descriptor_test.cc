// SPDX-License-Identifier: Apache-2.0
#include "client/session/descriptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "client/testing/fixtures.h"

namespace ashlar::internal {
namespace {

using testing::HasSubstr;

constexpr uint64_t kBytes = 1 << 16;

std::string Refusal(int fd, uint64_t bytes, Mapping::Access access) {
  const absl::StatusOr<Mapping> mapping = Mapping::Map(fd, bytes, access);
  EXPECT_EQ(mapping.status().code(), absl::StatusCode::kInvalidArgument) << mapping.status();
  return std::string(mapping.status().message());
}

TEST(Mapping, SharesTheMemfd) {
  const Descriptor fd = MakeMemfd(kBytes, F_SEAL_SHRINK);
  absl::StatusOr<Mapping> writer = Mapping::Map(fd.get(), kBytes, Mapping::Access::kReadWrite);
  absl::StatusOr<Mapping> reader = Mapping::Map(fd.get(), kBytes, Mapping::Access::kRead);
  ASSERT_TRUE(writer.ok() && reader.ok());
  writer->data()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(reader->data()[kBytes - 1], std::byte{42});
}

TEST(Mapping, RefusesAFileThatCanShrink) {
  const Descriptor fd = MakeMemfd(kBytes, F_SEAL_GROW);
  EXPECT_THAT(Refusal(fd.get(), kBytes, Mapping::Access::kReadWrite), HasSubstr("F_SEAL_SHRINK"));
}

TEST(Mapping, RefusesMoreBytesThanThereAre) {
  const Descriptor fd = MakeMemfd(kBytes, F_SEAL_SHRINK);
  EXPECT_THAT(Refusal(fd.get(), kBytes + 1, Mapping::Access::kRead), HasSubstr("bytes"));
  EXPECT_THAT(Refusal(fd.get(), 0, Mapping::Access::kRead), HasSubstr("bytes"));
}

TEST(Mapping, RefusesToWriteToASealedFile) {
  const Descriptor fd = MakeMemfd(kBytes, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE);
  EXPECT_THAT(Refusal(fd.get(), kBytes, Mapping::Access::kReadWrite), HasSubstr("F_SEAL_WRITE"));
  EXPECT_TRUE(Mapping::Map(fd.get(), kBytes, Mapping::Access::kRead).ok());
}

TEST(Mapping, RefusesOtherFilesThanMemfds) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Descriptor reader(ends[0]), writer(ends[1]);
  EXPECT_THAT(Refusal(reader.get(), kBytes, Mapping::Access::kRead), HasSubstr("memfd"));
}

}  // namespace
}  // namespace ashlar::internal
