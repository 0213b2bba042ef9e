// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/terminal.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <clocale>
#include <cstdlib>

#include "absl/strings/str_split.h"

namespace ashlar::ctl {
namespace {

TEST(Terminal, CountsColumnsAndNotCharacters) {
  ASSERT_NE(std::setlocale(LC_CTYPE, "C.UTF-8"), nullptr);
  EXPECT_EQ(WidthOf("näme"), 4u);
  EXPECT_EQ(WidthOf("模型"), 4u);
  EXPECT_EQ(WidthOf("e\xcc\x81"), 1u) << "a combining accent takes no column";
  EXPECT_EQ(Cut("abcdef", 4), "abc…");
  EXPECT_EQ(Cut("abcd", 4), "abcd");
  EXPECT_EQ(Cut("模型模型", 6), "模型…") << "half of a wide character is not shown";
  EXPECT_EQ(Padded("模", 4), "模  ");
  EXPECT_EQ(WidthOf(Padded("模型模型", 6)), 6u);
  EXPECT_EQ(Cut("x", 0), "");
}

TEST(Terminal, BreaksLinesAtSpacesWithoutLosingWords) {
  const std::string text =
      "tenant a: 12 segments requested, regions of 3 MiB\n"
      "  hits from dram     93.1 % of segments, 95.0 % of tokens\n\n"
      "0123456789012345678901234567890123456789\n";
  const std::string wrapped = Wrapped(text, 24);
  for (const auto line : absl::StrSplit(wrapped, '\n')) EXPECT_LE(WidthOf(line), 24u) << line;
  const auto letters = [](std::string all) {
    std::erase_if(all, [](char c) { return c == ' ' || c == '\n'; });
    return all;
  };
  EXPECT_EQ(letters(wrapped), letters(text));
  EXPECT_NE(wrapped.find("\n    "), std::string::npos) << "what follows a break is indented by two more: " << wrapped;
  EXPECT_EQ(Wrapped("short\nlines\n", 60), "short\nlines\n");
}

TEST(Terminal, WithoutATerminalTheWidthIsThatOfCOLUMNS) {
  setenv("COLUMNS", "60", 1);
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  EXPECT_TRUE(terminal || OutputColumns() == 60u);
  setenv("COLUMNS", "wide", 1);
  EXPECT_TRUE(terminal || OutputColumns() == std::nullopt);
  unsetenv("COLUMNS");
}

}  // namespace
}  // namespace ashlar::ctl
