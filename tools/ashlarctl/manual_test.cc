#include "tools/ashlarctl/manual.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

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
    for (const auto* all : {&command.options, &CommonOptions()}) {
      for (const Option& option : *all) {
        EXPECT_TRUE(options.insert(option.name).second) << command.name << " --" << option.name << " is there twice";
        EXPECT_STRNE(option.help, "") << option.name;
        EXPECT_THAT(Help(command), HasSubstr(std::string("--") + option.name));
        EXPECT_THAT(bash, HasSubstr(std::string("--") + option.name));
      }
    }
  }
}

TEST(Manual, ArgumentsThatACommandDoesNotTakeAreNamed) {
  const auto find = [](const std::string& name) -> const Command& {
    return *std::ranges::find(Commands(), name, &Command::name);
  };
  const auto message = [&](const std::string& command, const std::vector<std::string>& words) {
    return std::string(ParseArguments(find(command), words).status().message());
  };
  EXPECT_THAT(message("stats", {"file"}), HasSubstr("file: stats takes no files"));
  EXPECT_THAT(message("stats", {"--hard"}), HasSubstr("--hard: stats has no such option"));
  EXPECT_THAT(message("pin", {"--until"}), HasSubstr("--until: needs a value"));
  EXPECT_THAT(message("pin", {"--kind", "poem"}), HasSubstr("\"poem\" is none of prompt, segment, checkpoint"));
  EXPECT_THAT(message("completion", {"csh"}), HasSubstr("SHELL: \"csh\" is none of bash, zsh, fish"));
  const auto sound = ParseArguments(find("pin"), {"a", "--hard", "--kind", "segment", "b"});
  ASSERT_TRUE(sound.ok()) << sound.status();
  EXPECT_EQ(sound->files, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(sound->Has("hard"));
}

}  // namespace
}  // namespace ashlar::ctl
