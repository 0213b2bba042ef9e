// ashlarctl: what an operator asks of a running daemon.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/ashlarctl/admin_client.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {
namespace {

constexpr const char* kDefaultSocket = "/run/ashlar/admin.sock";
constexpr int kFailed = 1, kBadUsage = 2;

const std::vector<Command>& Commands() {
  static const auto* const commands = new std::vector<Command>{
      {"explain",
       "explain --tenant T (--namespace HEX | --model-file FILE) [--kind prompt|segment|checkpoint] [--binary]\n"
       "          TOKENS-FILE...    what a look-up of these texts finds, or why it misses. The first file is the\n"
       "                            prompt's prefix. Token ids as decimal numbers; --binary: int32 little endian\n"
       "  explain --last N [--tenant T]   the latest misses\n",
       {"tenant", "namespace", "model-file", "kind", "last"},
       {"binary"},
       true,
       Explain},
      {"pin",
       "pin --until TIME|--hard …  keeps the objects of these texts (as for explain) in some tier; TIME as in RFC "
       "3339\n",
       {"tenant", "namespace", "model-file", "kind", "until"},
       {"binary", "hard"},
       true,
       Pin},
      {"unpin",
       "unpin …                   ends that\n",
       {"tenant", "namespace", "model-file", "kind"},
       {"binary"},
       true,
       Unpin},
      {"evict",
       "evict …                   takes the objects of these texts out of all tiers\n",
       {"tenant", "namespace", "model-file", "kind"},
       {"binary"},
       true,
       Evict},
      {"models",
       "models [--tenant T]       the models that engines opened last, and their namespaces\n",
       {"tenant"},
       {},
       false,
       Models},
      {"stats",
       "stats                     tiers, tenants, hit rates, reasons of misses, evictions\n",
       {},
       {},
       false,
       Stats},
      {"sessions", "sessions                  the engines that are connected\n", {}, {}, false, Sessions},
      {"drain",
       "drain [--seconds S]       ends what is under way and writes to the disk what memory alone has; waits S "
       "seconds\n"
       "                            (else as long as the daemon would), and fails if something is left then\n",
       {"seconds"},
       {},
       false,
       Drain},
      {"undrain", "undrain                   takes requests again\n", {}, {}, false, Undrain},
      {"config", "config                    the configuration in effect\n", {}, {}, false, Config},
  };
  return *commands;
}

std::string Usage() {
  std::string usage = absl::StrCat(
      "usage: ashlarctl COMMAND [--socket PATH] [--json]\n\n"
      "--socket: listen.admin_socket of the daemon, else $ASHLAR_ADMIN_SOCKET, else ",
      kDefaultSocket, "\n--json: the answer as JSON\n\n");
  for (const Command& command : Commands()) absl::StrAppend(&usage, "  ", command.help);
  return usage;
}

// INVALID_ARGUMENT names what the command does not take.
absl::StatusOr<Arguments> Parse(const Command& command, const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word.rfind("--", 0) != 0) {
      if (!command.files) return absl::InvalidArgumentError(absl::StrCat(word, ": ", command.name, " takes no files"));
      arguments.files.push_back(word);
      continue;
    }
    const std::string name = word.substr(2);
    if (name == "json" || std::ranges::count(command.flags, name) > 0) {
      arguments.options[name] = "true";
    } else if (name != "socket" && std::ranges::count(command.options, name) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(word, ": ", command.name, " has no such option"));
    } else if (i + 1 == words.size() || words[i + 1].rfind("--", 0) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(word, ": needs a value"));
    } else {
      arguments.options[name] = words[++i];
    }
  }
  return arguments;
}

std::string SocketOf(const Arguments& arguments) {
  if (arguments.Has("socket")) return arguments.Get("socket");
  const char* given = std::getenv("ASHLAR_ADMIN_SOCKET");
  return given == nullptr || *given == '\0' ? kDefaultSocket : given;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "ashlarctl: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? kBadUsage : kFailed;
}

int Main(const std::vector<std::string>& words) {
  const std::string wanted = words.empty() ? "" : words[0];
  if (wanted == "--help" || wanted == "help") {
    std::fputs(Usage().c_str(), stdout);
    return 0;
  }
  const auto command = std::ranges::find(Commands(), wanted, &Command::name);
  if (command == Commands().end()) {
    std::fputs(Usage().c_str(), stderr);
    return kBadUsage;
  }
  const absl::StatusOr<Arguments> arguments = Parse(*command, {words.begin() + 1, words.end()});
  if (!arguments.ok()) return Fail(arguments.status());
  AdminClient client(SocketOf(*arguments));
  const absl::StatusOr<Answer> answer = command->run(*arguments, client);
  if (!answer.ok()) return Fail(answer.status());
  const std::string text = arguments->Has("json") ? answer->json.dump(2) + "\n" : answer->text;
  std::fputs(text.c_str(), stdout);
  return answer->failed ? kFailed : 0;
}

}  // namespace
}  // namespace ashlar::ctl

int main(int argc, char** argv) {
  return ashlar::ctl::Main({argv + 1, argv + argc});
}
