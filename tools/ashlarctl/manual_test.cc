// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/manual.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "tools/ashlarctl/json_fields.h"

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;

TEST(Manual, EveryPageHasEveryCommandAndOption) {
  const std::string page = absl::StrReplaceAll(ManualPage(), {{"\\-", "-"}}), bash = CompletionScript("bash"),
                    zsh = CompletionScript("zsh"), fish = CompletionScript("fish");
  std::set<std::string> names;
  for (const Command& command : Commands()) {
    EXPECT_TRUE(names.insert(command.name).second) << command.name << " is there twice";
    ASSERT_NE(command.run, nullptr) << command.name;
    for (const std::string& text : {Usage(), page, bash, zsh, fish}) EXPECT_THAT(text, HasSubstr(command.name));
    EXPECT_FALSE(JsonFieldsOf(command.name).empty()) << command.name << " does not say what its JSON has";
    for (const JsonField& field : JsonFieldsOf(command.name)) {
      EXPECT_THAT(Help(command), HasSubstr(field.path));
      EXPECT_THAT(page, HasSubstr(field.path));
    }
    std::set<std::string> options;
    for (const Option& option : OptionsOf(command)) {
      EXPECT_TRUE(options.insert(option.name).second) << command.name << " --" << option.name << " is there twice";
      EXPECT_STRNE(option.help, "") << option.name;
      EXPECT_THAT(Help(command), HasSubstr(std::string("--") + option.name));
      EXPECT_THAT(bash, HasSubstr(std::string("--") + option.name));
    }
  }
}

std::string RefusalOf(const std::vector<std::string>& words) {
  return std::string(ParseCommandLine(words).status().message());
}

TEST(CommandLine, ArgumentsThatACommandDoesNotTakeAreNamed) {
  EXPECT_THAT(RefusalOf({"stats", "file"}), HasSubstr("file: unknown argument of ashlarctl stats"));
  EXPECT_THAT(RefusalOf({"stats", "--hard"}), HasSubstr("--hard: unknown option of ashlarctl stats"));
  EXPECT_EQ(RefusalOf({"forget", "--tenant", "t"}), "forget: this command has been renamed; run ashlarctl erase");
  EXPECT_THAT(RefusalOf({"stauts"}), HasSubstr("stauts: unknown command of ashlarctl; did you mean status?"));
  EXPECT_THAT(RefusalOf({"pin", "--untill=2030"}), HasSubstr("did you mean --until?"));
  EXPECT_THAT(RefusalOf({"pin", "--until"}), HasSubstr("--until: 1 required TIME missing"));
  EXPECT_THAT(RefusalOf({"pin", "--kind", "poem"}), HasSubstr("--kind: poem not in {prompt,segment,checkpoint}"));
  EXPECT_THAT(RefusalOf({"completion", "csh"}), HasSubstr("csh not in {bash,zsh,fish}"));
  EXPECT_THAT(RefusalOf({}), HasSubstr("COMMAND: required"));
  EXPECT_THAT(RefusalOf({"health", "--socket", "/a"}), HasSubstr("did you mean --rpc-socket?"));
  EXPECT_THAT(RefusalOf({"--socket", "/a", "health"}),
              HasSubstr("--socket: not allowed, because health does not use the admin socket"));
}

TEST(CommandLine, ArgumentsAreTakenInAnyOrderAndForm) {
  const auto line =
      ParseCommandLine({"--json", "pin", "a", "--hard", "--kind=segment", "--socket=/s", "b", "--", "--c"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_STREQ(line->command->name, "pin");
  EXPECT_EQ(line->arguments.files, (std::vector<std::string>{"a", "b", "--c"}));
  EXPECT_TRUE(line->arguments.Has("hard") && line->arguments.Has("json"));
  EXPECT_EQ(line->arguments.Get("socket"), "/s");
  EXPECT_EQ(line->arguments.Get("kind"), "segment");
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"help", "pin"}, {"pin", "--help"}, {"pin", "-h"}}) {
    const auto help = ParseCommandLine(words);
    ASSERT_TRUE(help.ok() && help->printed) << words[0];
    EXPECT_THAT(*help->printed, HasSubstr("--until TIME"));
  }
  EXPECT_THAT(*ParseCommandLine({"--version"})->printed, HasSubstr("ashlarctl "));
}

std::optional<std::string> JsonFileOf(const std::vector<std::string>& words) {
  const auto line = ParseCommandLine(words);
  EXPECT_TRUE(line.ok()) << line.status();
  return line.ok() ? line->arguments.JsonFile() : std::nullopt;
}

TEST(CommandLine, JsonTakesAFileButNoOperand) {
  EXPECT_EQ(JsonFileOf({"doctor"}), std::nullopt);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"doctor", "--json"}, {"--json", "doctor"}, {"doctor", "--json", "--engine", "u"}}) {
    EXPECT_EQ(JsonFileOf(words), "");
  }
  for (const std::vector<std::string>& words : {std::vector<std::string>{"doctor", "--engine", "u", "--json", "f"},
                                                {"doctor", "--json", "f", "--engine", "u"},
                                                {"doctor", "--json=f"},
                                                {"--json=f", "doctor"},
                                                {"layout", "config", "--json=f"}}) {
    EXPECT_EQ(JsonFileOf(words), "f");
  }
  const auto layout = ParseCommandLine({"layout", "--json", "config"});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->arguments.JsonFile(), "") << "a configuration is not overwritten";
  EXPECT_EQ(layout->arguments.files, std::vector<std::string>{"config"});
}

}  // namespace
}  // namespace ashlar::ctl
