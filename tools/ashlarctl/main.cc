// ashlarctl: what an operator asks of a running daemon.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "proto/version.h"
#include "tools/ashlarctl/admin_client.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/manual.h"

namespace ashlar::ctl {
namespace {

constexpr const char* kDefaultSocket = "/run/ashlar/admin.sock";
constexpr int kFailed = 1, kBadUsage = 2;

std::string SocketOf(const Arguments& arguments) {
  if (arguments.Has("socket")) return arguments.Get("socket");
  const char* given = std::getenv("ASHLAR_ADMIN_SOCKET");
  return given == nullptr || *given == '\0' ? kDefaultSocket : given;
}

// Bytes that are no UTF-8, as an engine may have named its model, become U+FFFD.
std::string JsonText(const nlohmann::json& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// A failure is JSON, too, where JSON was asked for.
int Fail(const absl::Status& status, const std::vector<std::string>& words) {
  const std::string message(status.message());
  if (std::ranges::count(words, "--json") > 0) {
    std::fputs(JsonText({{"error", message}}).c_str(), stdout);
  }
  std::fprintf(stderr, "ashlarctl: %s\n", PrintableLines(message).c_str());
  return absl::IsInvalidArgument(status) ? kBadUsage : kFailed;
}

int Main(const std::vector<std::string>& words) {
  const std::string wanted = words.empty() ? "" : words[0];
  if (wanted == "--version") {
    std::printf("ashlarctl %s\n", Version());
    return 0;
  }
  if (wanted == "--help" || wanted == "help") {
    std::fputs(Usage().c_str(), stdout);
    return 0;
  }
  const auto command = std::ranges::find(Commands(), wanted, &Command::name);
  if (command == Commands().end()) {
    std::fputs(Usage().c_str(), stderr);
    return kBadUsage;
  }
  const absl::StatusOr<Arguments> arguments = ParseArguments(*command, {words.begin() + 1, words.end()});
  if (!arguments.ok()) return Fail(arguments.status(), words);
  if (arguments->Has("help")) {
    std::fputs(Help(*command).c_str(), stdout);
    return 0;
  }
  AdminClient client(SocketOf(*arguments));
  const absl::StatusOr<Answer> answer = command->run(*arguments, client);
  if (!answer.ok()) return Fail(answer.status(), words);
  const std::string text = arguments->Has("json") ? JsonText(answer->json) : PrintableLines(answer->text);
  std::fputs(text.c_str(), stdout);
  return answer->failed ? kFailed : 0;
}

}  // namespace
}  // namespace ashlar::ctl

int main(int argc, char** argv) {
  return ashlar::ctl::Main({argv + 1, argv + argc});
}
