// SPDX-License-Identifier: Apache-2.0
// Arguments and answers of ashlarctl's sub-commands.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "tools/ashlarctl/admin_client.h"

namespace ashlar::ctl {

struct Arguments {
  // By name without dashes. A flag has the value "true"; "json" has its file, or an empty value.
  std::map<std::string, std::string> options;
  std::vector<std::string> files;

  bool Has(const std::string& name) const { return options.contains(name); }
  // The file of --json; empty: the standard output. nullopt: JSON is not asked for.
  std::optional<std::string> JsonFile() const { return Has("json") ? std::optional(Get("json")) : std::nullopt; }
  std::string Get(const std::string& name) const { return Has(name) ? options.at(name) : ""; }
};

// The answer as JSON, and as text for people.
struct Answer {
  nlohmann::json json;
  std::string text;
  bool failed = false;    // the request did not succeed; the text says why
  bool refused = false;   // a named file is invalid; the text names the field
  bool verbatim = false;  // the text is for programs: its lines are not wrapped
};

struct Option {
  const char* name;                     // without dashes
  const char* value = "";               // placeholder in help; empty: a flag; in brackets: may be missing
  const char* help = "";                // one line
  std::vector<const char*> words = {};  // allowed values; empty: any
};

// One sub-command. Parser, --help, man page and completion are generated from it (manual.h).
struct Command {
  const char* name;
  const char* operands = "";  // placeholder of the operands in help, such as "TOKENS-FILE..."; empty: no operands
  const char* summary = "";   // one line, without a full stop
  const char* detail = "";    // sentences for the man page and for `COMMAND --help`
  std::vector<Option> options;
  // INVALID_ARGUMENT begins with the option's or the field's name.
  absl::StatusOr<Answer> (*run)(const Arguments& arguments, AdminClient& client) = nullptr;
  std::vector<const char*> operand_words;  // all values that an operand may have; empty: files
  bool offline = false;                    // does not ask the admin socket, and takes no --socket
};

// In the order of the help.
const std::vector<Command>& Commands();
// Options of every command.
const std::vector<Option>& CommonOptions();
// An option of every command that is not offline.
const Option& SocketOption();
// All options of a command.
std::vector<Option> OptionsOf(const Command& command);

struct CommandLine {
  const Command* command = nullptr;  // null: `printed` has a value
  Arguments arguments;
  std::optional<std::string> printed;  // help or version, to print instead of running a command
};

// INVALID_ARGUMENT names the option or operand that the command does not take.
absl::StatusOr<CommandLine> ParseCommandLine(std::vector<std::string> words);

absl::StatusOr<Answer> Explain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Models(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Stats(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Sessions(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Peers(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Pin(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Unpin(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Evict(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Probe(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Warm(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Ls(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Erase(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Verify(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Reload(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Drain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Undrain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Status(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Top(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> SupportBundle(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Health(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Doctor(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> LayoutCosts(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Config(const Arguments& arguments, AdminClient& client);

}  // namespace ashlar::ctl
