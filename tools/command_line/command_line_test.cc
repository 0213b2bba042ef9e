// SPDX-License-Identifier: Apache-2.0
#include "tools/command_line/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::command_line {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Tool {
  Tool() : app("A tool.", "tool") {
    app.set_version_flag("--version", "tool 1.2");
    CLI::App* const status = app.add_subcommand("status", "Shows the state.");
    status->add_option("--socket", socket, "Socket to ask.")->type_name("PATH")->required();
    status->add_option("--rpc-timeout", timeout, "Seconds.")->check(CLI::Range(1, 9));
    status->add_flag("--json", json, "Prints JSON.");
    status->add_option("FILE", files, "Files to read.");
    app.add_subcommand("stop", "Stops.");
  }

  std::string Error(const std::vector<std::string>& words) {
    std::optional<std::string> printed;
    return std::string(ParseWords(app, words, printed).message());
  }
  std::string Printed(const std::vector<std::string>& words) {
    std::optional<std::string> printed;
    EXPECT_TRUE(ParseWords(app, words, printed).ok());
    return printed.value_or("");
  }

  CLI::App app;
  std::string socket;
  int timeout = 0;
  bool json = false;
  std::vector<std::string> files;
};

TEST(CommandLine, AcceptsBothValueFormsAndDoubleDash) {
  Tool tool;
  EXPECT_EQ(tool.Error({"status", "--socket=/a", "x", "--json", "--", "--odd"}), "");
  EXPECT_EQ(tool.socket, "/a");
  EXPECT_TRUE(tool.json);
  EXPECT_EQ(tool.files, (std::vector<std::string>{"x", "--odd"}));
  EXPECT_EQ(Tool().Error({"status", "--socket", "/a"}), "");
}

TEST(CommandLine, AnUnknownWordIsNamedWithTheNearestKnownOne) {
  EXPECT_EQ(Tool().Error({"stauts"}), "stauts: unknown command of tool; did you mean status?; see tool --help");
  EXPECT_EQ(Tool().Error({"frobnicate"}), "frobnicate: unknown command of tool; see tool --help");
  // Reported before the required option that it was meant to be.
  EXPECT_EQ(Tool().Error({"status", "--sokcet=/a"}),
            "--sokcet: unknown option of tool status; did you mean --socket?; see tool status --help");
  EXPECT_THAT(Tool().Error({"status", "--socket", "/a", "--timeout", "3"}), HasSubstr("did you mean --rpc-timeout?"));
  EXPECT_THAT(Tool().Error({"stop", "now"}), StartsWith("now: unknown argument of tool stop"));
}

TEST(CommandLine, ABadOrMissingValueNamesItsOption) {
  EXPECT_THAT(Tool().Error({"status", "--socket"}), HasSubstr("--socket"));
  EXPECT_THAT(Tool().Error({"status"}), HasSubstr("--socket is required"));
  EXPECT_THAT(Tool().Error({"status", "--socket", "/a", "--rpc-timeout", "99"}), HasSubstr("--rpc-timeout"));
  EXPECT_THAT(Tool().Error({"status", "--socket", "/a", "--rpc-timeout", "soon"}), HasSubstr("soon"));
}

TEST(CommandLine, HelpAndVersionArePrintedInsteadOfRunning) {
  EXPECT_THAT(Tool().Printed({"--help"}), HasSubstr("stop"));
  EXPECT_THAT(Tool().Printed({"status", "--help"}), HasSubstr("--rpc-timeout")) << "although --socket is missing";
  EXPECT_EQ(Tool().Printed({"--version"}), "tool 1.2\n");
}

}  // namespace
}  // namespace ashlar::command_line
