// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "proto/tokens.h"

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;

class TokenFile : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& bytes) {
    const std::string path = folder_ + "/file";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::string folder_ = "/tmp/ashlarctl_test_XXXXXX";
};

TEST_F(TokenFile, ReadsNumbersHoweverTheyAreSeparated) {
  const std::vector<int32_t> tokens = {1, -2, 2147483647};
  for (const char* text : {"1 -2 2147483647", "[1, -2, 2147483647]\n", "1\n-2\r\n\t2147483647"}) {
    EXPECT_EQ(*ReadTokenFile(Write(text), false), PackTokens(tokens)) << text;
  }
  EXPECT_EQ(*ReadTokenFile(Write(PackTokens(tokens)), true), PackTokens(tokens));
  EXPECT_EQ(*ReadTokenFile(Write(""), false), "");
}

TEST_F(TokenFile, NamesTheFileThatIsInvalid) {
  const auto message = [](const auto& result) { return std::string(result.status().message()); };
  EXPECT_THAT(message(ReadTokenFile(Write("1 two"), false)), HasSubstr("/file: \"two\" is not a token id"));
  EXPECT_THAT(message(ReadTokenFile(Write("2147483648"), false)), HasSubstr("is not a token id"));
  EXPECT_THAT(message(ReadTokenFile(Write("12345"), true)),
              HasSubstr("/file: length is not a multiple of 4 bytes (int32)"));
  EXPECT_THAT(message(ReadTokenFile(folder_ + "/absent", false)), HasSubstr("/absent"));
}

TEST_F(TokenFile, ReadsAnEnginesDeclarations) {
  using std::string_literals::operator""s;
  const auto model = ReadModelFile(Write("\2\0\0\0AB\3\0\0\0xyz"s));
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->identity, "AB");
  EXPECT_EQ(model->layout, "xyz");
  for (const std::string& bytes : {"\2\0\0"s, "\2\0\0\0A"s, "\2\0\0\0AB\4\0\0\0xyz"s, "\2\0\0\0AB\3\0\0\0xyz."s}) {
    EXPECT_FALSE(ReadModelFile(Write(bytes)).ok()) << bytes.size();
  }
}

}  // namespace
}  // namespace ashlar::ctl
