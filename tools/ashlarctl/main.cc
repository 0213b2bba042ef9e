// SPDX-License-Identifier: Apache-2.0
// ashlarctl: what an operator asks of a running daemon.
#include <algorithm>
#include <clocale>
#include <cstdio>
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

// Bytes that are no UTF-8, as an engine may have named its model, become U+FFFD.
std::string JsonText(const nlohmann::json& value) {
  return PrintableJson(value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace)) + "\n";
}

// A failure is JSON, too, where JSON was asked for.
int Fail(const absl::Status& status, bool as_json) {
  std::string message(status.message());
  if (message.empty()) message = absl::StatusCodeToString(status.code());
  if (as_json) std::fputs(JsonText({{"error", message}}).c_str(), stdout);
  std::fprintf(stderr, "ashlarctl: %s\n", PrintableLines(message).c_str());
  return command_line::Finish("ashlarctl", absl::IsInvalidArgument(status) ? command_line::kBadUsage : kFailed);
}

std::string TextOf(const Answer& answer, bool as_json) {
  if (as_json) return JsonText(answer.json);
  const std::string text = PrintableLines(answer.text);
  const std::optional<size_t> columns = answer.verbatim ? std::nullopt : OutputColumns();
  return columns ? Wrapped(text, *columns) : text;
}

int Main(const std::vector<std::string>& words) {
  std::setlocale(LC_CTYPE, "C.UTF-8");  // for the width of characters
  const absl::StatusOr<CommandLine> line = ParseCommandLine(words);
  if (!line.ok()) return Fail(line.status(), std::ranges::count(words, "--json") > 0);
  if (line->printed) {
    std::fputs(line->printed->c_str(), stdout);
    return command_line::Finish("ashlarctl", 0);
  }
  const bool as_json = line->arguments.Has("json");
  AdminClient client(SocketOf(line->arguments));
  const absl::StatusOr<Answer> answer = line->command->run(line->arguments, client);
  if (!answer.ok()) return Fail(answer.status(), as_json);
  std::fputs(TextOf(*answer, as_json).c_str(), stdout);
  return command_line::Finish("ashlarctl", answer->refused ? command_line::kBadUsage : answer->failed ? kFailed : 0);
}

}  // namespace
}  // namespace ashlar::ctl

int main(int argc, char** argv) {
  return ashlar::ctl::Main({argv + 1, argv + argc});
}
