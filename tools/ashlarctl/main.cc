// SPDX-License-Identifier: Apache-2.0
// ashlarctl: the operator's command line for a running daemon.
#include <algorithm>
#include <clocale>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tools/ashlarctl/admin_client.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/default_socket.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/terminal.h"
#include "tools/command_line/command_line.h"

namespace ashlar::ctl {
namespace {

constexpr int kFailed = 1;

std::string SocketOf(const Arguments& arguments) {
  return arguments.Has("socket") ? arguments.Get("socket") : DefaultSocket("ASHLAR_ADMIN_SOCKET", "admin.sock");
}

// Bytes that are not UTF-8, for example in a model's name, become U+FFFD.
std::string JsonText(const nlohmann::json& value) {
  return PrintableJson(value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace)) + "\n";
}

// Writes JSON to the file of --json, or to the standard output if that is empty. False: the file cannot be written.
bool PutJson(const nlohmann::json& value, const std::string& file) {
  if (file.empty()) {
    std::fputs(JsonText(value).c_str(), stdout);
    return true;
  }
  std::ofstream out(file);
  out << JsonText(value);
  if (out.flush()) return true;
  std::fprintf(stderr, "ashlarctl: --json: cannot write %s\n", PrintableLines(file).c_str());
  return false;
}

// A failure is also JSON if JSON was requested.
int Fail(const absl::Status& status, const std::optional<std::string>& json_file) {
  std::string message(status.message());
  if (message.empty()) message = absl::StatusCodeToString(status.code());
  if (json_file) PutJson({{"error", message}}, *json_file);
  std::fprintf(stderr, "ashlarctl: %s\n", PrintableLines(message).c_str());
  return command_line::Finish("ashlarctl", absl::IsInvalidArgument(status) ? command_line::kBadUsage : kFailed);
}

std::string TextOf(const Answer& answer) {
  const std::string text = PrintableLines(answer.text);
  const std::optional<size_t> columns = answer.verbatim ? std::nullopt : OutputColumns();
  return columns ? Wrapped(text, *columns) : text;
}

int Main(const std::vector<std::string>& words) {
  std::setlocale(LC_CTYPE, "C.UTF-8");  // for the width of characters
  const absl::StatusOr<CommandLine> line = ParseCommandLine(words);
  if (!line.ok()) {
    return Fail(line.status(), std::ranges::count(words, "--json") > 0 ? std::optional<std::string>("") : std::nullopt);
  }
  if (line->printed) {
    std::fputs(line->printed->c_str(), stdout);
    return command_line::Finish("ashlarctl", 0);
  }
  const std::optional<std::string> json_file = line->arguments.JsonFile();
  AdminClient client(SocketOf(line->arguments));
  const absl::StatusOr<Answer> answer = line->command->run(line->arguments, client);
  if (!answer.ok()) return Fail(answer.status(), json_file);
  if (json_file && !PutJson(answer->json, *json_file)) return command_line::Finish("ashlarctl", kFailed);
  if (!json_file || !json_file->empty()) std::fputs(TextOf(*answer).c_str(), stdout);
  return command_line::Finish("ashlarctl", answer->refused ? command_line::kBadUsage : answer->failed ? kFailed : 0);
}

}  // namespace
}  // namespace ashlar::ctl

int main(int argc, char** argv) {
  return ashlar::ctl::Main({argv + 1, argv + argc});
}
