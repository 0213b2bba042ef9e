// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/format.h"

#include <gtest/gtest.h>

namespace ashlar::ctl {
namespace {

TEST(Printable, EscapesControlSequences) {
  EXPECT_EQ(Printable("vllm 0.9 – 模型 🙂 \xc3\xa9"), "vllm 0.9 – 模型 🙂 é");
  EXPECT_EQ(Printable("\x1b[2J\x1b]0;root\x07"), "\\x1b[2J\\x1b]0;root\\x07");
  EXPECT_EQ(Printable("a\nsession 9: tenant x\r\t\x7f"), "a\\x0asession 9: tenant x\\x0d\\x09\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b2J")
      << "C1: a terminal takes it for an escape and a bracket";
  EXPECT_EQ(Printable(absl::string_view("a\0b", 3)), "a\\x00b");
}

TEST(Printable, EscapesInvalidUtf8) {
  EXPECT_EQ(Printable("a\x9b"
                      "b"),
            "a\\x9bb");
  EXPECT_EQ(Printable("\xc3"), "\\xc3") << "cut off";
  EXPECT_EQ(Printable("\xc0\x8a"), "\\xc0\\x8a") << "a longer form of a new line";
  EXPECT_EQ(Printable("\xe0\x82\x9b"), "\\xe0\\x82\\x9b");
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "half of a surrogate pair";
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

TEST(Printable, EscapesInvisibleAndBidirectionalCharacters) {
  EXPECT_EQ(Printable("a\xe2\x80\xae"
                      "b"),
            "a\\xe2\\x80\\xaeb")
      << "U+202E, right to left";
  EXPECT_EQ(Printable("a\xe2\x80\x8b"
                      "b"),
            "a\\xe2\\x80\\x8bb")
      << "U+200B, of no width";
  EXPECT_EQ(Printable("\xef\xbb\xbf"
                      "a\xe2\x80\xa8"),
            "\\xef\\xbb\\xbfa\\xe2\\x80\\xa8")
      << "byte order mark, line separator";
  EXPECT_EQ(Printable("\xf3\xa0\x81\x81"), "\\xf3\\xa0\\x81\\x81") << "a tag, U+E0041";
  EXPECT_EQ(Printable("عربى ไทย e\xcc\x81"), "عربى ไทย e\xcc\x81") << "letters and combining accents stay";
}

TEST(Printable, EscapesTheSameInJson) {
  EXPECT_EQ(PrintableJson("{\n  \"a\": \"é\xe2\x80\xae\x7f\xf3\xa0\x81\x81\"\n}\n"),
            "{\n  \"a\": \"é\\u202e\\u007f\\udb40\\udc41\"\n}\n");
}

TEST(Printable, KeepsLineBreaks) {
  EXPECT_EQ(PrintableLines("a\tb\n\x1b[1mc\n"), "a\tb\n\\x1b[1mc\n");
}

}  // namespace
}  // namespace ashlar::ctl
