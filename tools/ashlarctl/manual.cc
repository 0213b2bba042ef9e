// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/manual.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "proto/version.h"
#include "tools/ashlarctl/json_fields.h"

namespace ashlar::ctl {
namespace {

constexpr const char* kAbout = "inspect and control a running ashlard";
constexpr const char* kExits =
    "0: success. 1: the daemon refused, or a check failed. 2: an argument, or the file it names, is invalid.";

std::string Shown(const Option& option) {
  return absl::StrCat("--", option.name, *option.value == '\0' ? "" : " ", option.value);
}

bool MayBeMissing(const Option& option) {
  return option.value[0] == '[';
}

std::string Synopsis(const Command& command) {
  return absl::StrCat(command.name, command.options.empty() ? "" : " [OPTION]...", *command.operands == '\0' ? "" : " ",
                      command.operands);
}

std::string HelpOf(const Option& option) {
  if (option.words.empty()) return option.help;
  return absl::StrCat(option.help, " (", absl::StrJoin(option.words, ", "), ")");
}

std::string Words(const std::vector<const char*>& words) {
  return absl::StrJoin(words, " ");
}

std::string Names(const std::vector<Option>& options) {
  std::string names;
  for (const Option& option : options) absl::StrAppend(&names, names.empty() ? "" : " ", "--", option.name);
  return names;
}

// A hyphen that can be copied from the page, and no line that begins like a request.
std::string Troff(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\e"}, {"-", "\\-"}, {"\n.", "\n\\&."}, {"\n'", "\n\\&'"}});
}

std::string TroffOption(const Option& option) {
  return absl::StrCat(".TP\n.B ", Troff(Shown(option)), "\n", Troff(HelpOf(option)), "\n");
}

std::string BashScript() {
  std::string commands, cases;
  for (const Command& command : Commands()) {
    absl::StrAppend(&commands, commands.empty() ? "" : " ", command.name);
    absl::StrAppend(&cases, "    ", command.name, ") words=\"", Names(OptionsOf(command)),
                    command.operand_words.empty() ? "" : " ", Words(command.operand_words), "\";;\n");
  }
  std::string values;
  for (const Command& command : Commands()) {
    for (const Option& option : command.options) {
      if (option.words.empty()) continue;
      absl::StrAppend(&values, "    ", command.name, ":--", option.name, ") words=\"", Words(option.words), "\";;\n");
    }
  }
  return absl::StrCat(
      "_ashlarctl() {\n"
      "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    COMPREPLY=($(compgen -W \"",
      commands,
      "\" -- \"$current\"))\n"
      "    return\n"
      "  fi\n"
      "  case ${COMP_WORDS[1]}:$previous in\n",
      values,
      "    *:--socket|*:--model-file) ;;\n"
      "    *) case ${COMP_WORDS[1]} in\n",
      cases,
      "    esac;;\n"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "}\n"
      "complete -o default -F _ashlarctl ashlarctl\n");
}

// A word inside single quotes of zsh and fish.
std::string Quoted(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"'", "'\\''"}, {"[", "("}, {"]", ")"}, {":", ";"}});
}

std::string ZshOption(const Option& option) {
  std::string spec = absl::StrCat("'--", option.name, "[", Quoted(option.help), "]");
  if (*option.value != '\0') {
    absl::StrAppend(&spec, MayBeMissing(option) ? "::" : ":", absl::StrReplaceAll(option.value, {{"[", ""}, {"]", ""}}),
                    ":", option.words.empty() ? "_files" : absl::StrCat("(", Words(option.words), ")"));
  }
  return spec + "'";
}

std::string ZshScript() {
  std::string commands, cases;
  for (const Command& command : Commands()) {
    absl::StrAppend(&commands, "    '", command.name, ":", Quoted(command.summary), "'\n");
    absl::StrAppend(&cases, "    ", command.name, ") _arguments");
    for (const Option& option : OptionsOf(command)) absl::StrAppend(&cases, " ", ZshOption(option));
    if (!command.operand_words.empty()) {
      absl::StrAppend(&cases, " '1:", command.operands, ":(", Words(command.operand_words), ")'");
    } else if (*command.operands != '\0') {
      absl::StrAppend(&cases, " '*:file:_files'");
    }
    cases += ";;\n";
  }
  return absl::StrCat(
      "#compdef ashlarctl\n"
      "_ashlarctl() {\n"
      "  local -a commands=(\n",
      commands,
      "  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  local command=${words[2]}\n"
      "  shift words\n"
      "  ((CURRENT--))\n"
      "  case $command in\n",
      cases,
      "  esac\n"
      "}\n"
      "compdef _ashlarctl ashlarctl\n");
}

std::string FishScript() {
  std::string script = "complete -c ashlarctl -n __fish_use_subcommand -f\n";
  for (const Command& command : Commands()) {
    absl::StrAppend(&script, "complete -c ashlarctl -n __fish_use_subcommand -a ", command.name, " -d '",
                    Quoted(command.summary), "'\n");
    const std::string within =
        absl::StrCat("complete -c ashlarctl -n '__fish_seen_subcommand_from ", command.name, "' ");
    for (const Option& option : OptionsOf(command)) {
      absl::StrAppend(&script, within, "-l ", option.name, *option.value == '\0' || MayBeMissing(option) ? "" : " -r");
      if (!option.words.empty()) absl::StrAppend(&script, " -f -a '", Words(option.words), "'");
      absl::StrAppend(&script, " -d '", Quoted(option.help), "'\n");
    }
    if (!command.operand_words.empty()) {
      absl::StrAppend(&script, within, "-f -a '", Words(command.operand_words), "'\n");
    }
  }
  return script;
}

}  // namespace

std::string ManualPage() {
  std::string page = absl::StrCat(".TH ASHLARCTL 1 \"\" \"ashlar ", Version(), "\" \"User Commands\"\n.SH NAME\n",
                                  Troff(absl::StrCat("ashlarctl - ", kAbout)), "\n.SH SYNOPSIS\n.B ashlarctl\n",
                                  Troff("COMMAND [OPTION]..."), "\n.SH COMMANDS\n");
  for (const Command& command : Commands()) {
    absl::StrAppend(&page, ".SS ", Troff(Synopsis(command)), "\n", Troff(command.summary), ".\n");
    if (*command.detail != '\0') absl::StrAppend(&page, Troff(command.detail), "\n");
    for (const Option& option : command.options) page += TroffOption(option);
    absl::StrAppend(&page, ".TP\n.B Fields with ", Troff("--json"), "\n.nf\n");
    for (const JsonField& field : JsonFieldsOf(command.name)) {
      absl::StrAppend(&page, Troff(field.path), *field.meaning == '\0' ? "" : "  ", Troff(field.meaning), "\n");
    }
    page += ".fi\n";
  }
  page += ".SH OPTIONS OF EVERY COMMAND\n";
  for (const Option& option : CommonOptions()) page += TroffOption(option);
  page += ".SH OPTIONS OF COMMANDS THAT ASK A DAEMON\n" + TroffOption(SocketOption());
  absl::StrAppend(&page, ".SH EXIT STATUS\n", Troff(kExits), "\n.SH ENVIRONMENT\n.TP\n.B ASHLAR_ADMIN_SOCKET\n",
                  "The daemon's admin socket, if ", Troff("--socket"), " is not given.\n");
  return page;
}

std::string CompletionScript(const std::string& shell) {
  if (shell == "bash") return BashScript();
  return shell == "zsh" ? ZshScript() : FishScript();
}

absl::StatusOr<Answer> Completion(const Arguments& arguments, AdminClient&) {
  if (arguments.files.size() != 1) return absl::InvalidArgumentError("SHELL: exactly one is required");
  const std::string script = CompletionScript(arguments.files[0]);
  return Answer{.json = {{"shell", arguments.files[0]}, {"script", script}}, .text = script, .verbatim = true};
}

absl::StatusOr<Answer> Manual(const Arguments&, AdminClient&) {
  const std::string page = ManualPage();
  return Answer{.json = {{"page", page}}, .text = page, .verbatim = true};
}

}  // namespace ashlar::ctl
