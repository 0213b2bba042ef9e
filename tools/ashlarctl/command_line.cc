// SPDX-License-Identifier: Apache-2.0
// ParseCommandLine and the help texts, by CLI11 from the table of commands.
#include "tools/command_line/command_line.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/version.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/json_fields.h"
#include "tools/ashlarctl/manual.h"

namespace ashlar::ctl {
namespace {

constexpr size_t kHelpColumns = 26;    // columns of names in the help
constexpr const char* kFlag = "true";  // CLI11's value of an option without one

// Adds --json [FILE]. Before the command's name or operands, which its file could be taken for, only as --json=FILE.
void AddJson(CLI::App& app, bool before_words, Arguments& arguments) {
  const auto set = [&arguments](const std::string& file) { arguments.options["json"] = file == kFlag ? "" : file; };
  const Option& option = CommonOptions().front();
  CLI::Option* const added = app.add_option_function<std::string>("--json", set, option.help);
  added->type_name(option.value)->take_last();
  if (before_words) {
    added->expected(0);
  } else {
    added->expected(0, 1);
  }
}

void Add(CLI::App& app, const Option& option, Arguments& arguments) {
  const std::string name = option.name;
  if (name == "help" || name == "json") return;  // options of CLI11, and of AddJson
  if (*option.value == '\0') {
    app.add_flag_function(
        "--" + name, [&arguments, name](int64_t) { arguments.options[name] = kFlag; }, option.help);
    return;
  }
  CLI::Option* const added = app.add_option_function<std::string>(
      "--" + name, [&arguments, name](const std::string& value) { arguments.options[name] = value; }, option.help);
  added->type_name(option.value)->take_last();
  if (!option.words.empty())
    added->check(CLI::IsMember(std::vector<std::string>(option.words.begin(), option.words.end())));
}

// The command's detail, and the fields of its JSON.
std::string FooterOf(const Command& command) {
  std::string footer = absl::StrCat(command.detail, *command.detail == '\0' ? "" : "\n\n", "Fields with --json:");
  for (const JsonField& field : JsonFieldsOf(command.name)) {
    absl::StrAppend(&footer, "\n  ", field.path, *field.meaning == '\0' ? "" : "  ", field.meaning);
  }
  return footer;
}

void Add(CLI::App& app, const Command& command, Arguments& arguments) {
  CLI::App* const sub = app.add_subcommand(command.name, command.summary);
  sub->set_help_flag("--help,-h", CommonOptions().back().help);
  for (const Option& option : OptionsOf(command)) Add(*sub, option, arguments);
  AddJson(*sub, /*before_words=*/*command.operands != '\0', arguments);
  if (*command.operands != '\0') {
    CLI::Option* const operands =
        sub->add_option(std::string(absl::StripSuffix(command.operands, "...")), arguments.files)->type_name("");
    if (!command.operand_words.empty()) {
      operands->check(
          CLI::IsMember(std::vector<std::string>(command.operand_words.begin(), command.operand_words.end())));
    }
  }
  sub->get_formatter()->column_width(kHelpColumns);
  sub->footer(FooterOf(command));
}

// One parse. Options that all commands have are also accepted before the command's name.
class Parser {
 public:
  Parser() : app_("Inspect and control a running ashlard.", "ashlarctl") {
    app_.get_formatter()->column_width(kHelpColumns);
    app_.set_help_flag("--help,-h", "print this help; for a command: ashlarctl COMMAND --help");
    app_.set_version_flag("--version", absl::StrCat("ashlarctl ", Version()), "print the version");
    Add(app_, SocketOption(), line_.arguments);
    AddJson(app_, /*before_words=*/true, line_.arguments);
    for (const Command& command : Commands()) Add(app_, command, line_.arguments);
  }

  std::string Help(const std::string& command) const {
    return command.empty() ? app_.help() : app_.get_subcommand(command)->help();
  }

  absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& words) {
    if (!words.empty() && words[0] == "forget") {
      return absl::InvalidArgumentError("forget: this command has been renamed; run ashlarctl erase");
    }
    const absl::Status parsed = command_line::ParseWords(app_, words, line_.printed);
    if (!parsed.ok()) return parsed;
    if (line_.printed) return line_;
    if (app_.get_subcommands().empty()) {
      return absl::InvalidArgumentError("COMMAND: required; ashlarctl --help lists the commands");
    }
    line_.command = &*std::ranges::find(Commands(), app_.get_subcommands()[0]->get_name(), &Command::name);
    if (line_.command->offline && line_.arguments.Has("socket")) {
      return absl::InvalidArgumentError(
          absl::StrCat("--socket: not allowed, because ", line_.command->name, " does not use the admin socket"));
    }
    return line_;
  }

 private:
  CLI::App app_;
  CommandLine line_;
};

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(std::vector<std::string> words) {
  // As in git: `help` alone, or before a command.
  if (!words.empty() && words[0] == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  return Parser().Parse(words);
}

std::string Usage() {
  return Parser().Help("");
}

std::string Help(const Command& command) {
  return Parser().Help(command.name);
}

}  // namespace ashlar::ctl
