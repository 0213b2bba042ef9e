// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <charconv>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ashlar/engine.h"

namespace ashlar::engine {
namespace {

template <typename T>
std::vector<T> NumbersIn(absl::string_view text) {
  std::vector<T> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const auto read = std::from_chars(part.data(), part.data() + part.size(), numbers.emplace_back());
    EXPECT_EQ(read.ptr, part.data() + part.size()) << part;
  }
  return numbers;
}

TEST(SegmentLengths, VectorsSharedWithPython) {
  std::ifstream file(ASHLAR_SOURCE_DIR "/client/engine/testdata/segment_lengths.txt");
  int vectors = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("#")) continue;
    SCOPED_TRACE(line);
    const std::vector<absl::string_view> fields = absl::StrSplit(line, '|');
    ASSERT_EQ(fields.size(), 4u);
    const auto tokens = NumbersIn<int32_t>(fields[0]), separator = NumbersIn<int32_t>(fields[1]);
    const auto minimum = NumbersIn<uint64_t>(fields[2]);
    ASSERT_EQ(minimum.size(), 1u);
    std::vector<uint64_t> lengths(tokens.size());
    uint64_t count = 0;
    const Status status = SegmentLengths(tokens.data(), tokens.size(), separator.data(), separator.size(), minimum[0],
                                         lengths.data(), lengths.size(), &count);
    ASSERT_TRUE(status.ok()) << status.message;
    ASSERT_LE(count, lengths.size());
    lengths.resize(count);
    EXPECT_EQ(lengths, NumbersIn<uint64_t>(fields[3]));
    ++vectors;
  }
  EXPECT_GT(vectors, 10);
}

TEST(SegmentLengths, CountsMoreSegmentsThanItCanWrite) {
  const int32_t tokens[] = {1, 9, 2, 9, 3}, separator = 9;
  uint64_t length = 77, count = 0;
  EXPECT_TRUE(SegmentLengths(tokens, 5, &separator, 1, 0, &length, 1, &count).ok());
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(length, 77u);
  count = 0;
  EXPECT_TRUE(SegmentLengths(tokens, 5, &separator, 1, 0, nullptr, 0, &count).ok());
  EXPECT_EQ(count, 2u);
}

TEST(SegmentLengths, RefusalsNameTheArgument) {
  const int32_t tokens[] = {1, 9, 2}, separator = 9;
  uint64_t lengths[3], count = 77;
  const auto expect = [&](const Status& status, const char* message) {
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_STREQ(status.message, message);
    EXPECT_EQ(count, 77u);
  };
  expect(SegmentLengths(nullptr, 3, &separator, 1, 0, lengths, 3, &count), "tokens: null");
  expect(SegmentLengths(tokens, 3, &separator, 0, 0, lengths, 3, &count),
         "separator: no tokens; expected at least one");
  expect(SegmentLengths(tokens, 3, nullptr, 1, 0, lengths, 3, &count), "separator: null");
  expect(SegmentLengths(tokens, 3, &separator, 1, 0, nullptr, 3, &count), "lengths: null");
  expect(SegmentLengths(tokens, 3, &separator, 1, 0, lengths, 3, nullptr), "count: null");
}

}  // namespace
}  // namespace ashlar::engine
