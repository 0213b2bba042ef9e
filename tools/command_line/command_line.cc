// SPDX-License-Identifier: Apache-2.0
#include "tools/command_line/command_line.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"

namespace ashlar::command_line {
namespace {

constexpr size_t kLongestWord = 64;  // longer words are not compared

// The number of insertions, deletions, replacements and swaps of neighbours that turn one word into the other.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> least(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        least[i][j] = i + j;
        continue;
      }
      least[i][j] =
          std::min({least[i - 1][j] + 1, least[i][j - 1] + 1, least[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) least[i][j] = std::min(least[i][j], least[i - 2][j - 2] + 1);
    }
  }
  return least.back().back();
}

// The parsed command, the deepest one.
CLI::App& CommandOf(CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app : CommandOf(*parsed.back());
}

std::string NameOf(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : absl::StrCat(NameOf(*app.get_parent()), " ", app.get_name());
}

std::vector<std::string> KnownWords(const CLI::App& app, bool options) {
  std::vector<std::string> known;
  if (!options) {
    for (const CLI::App* const command : app.get_subcommands([](const CLI::App*) { return true; })) {
      known.push_back(command->get_name());
    }
    return known;
  }
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back(absl::StrCat("--", name));
  }
  return known;
}

absl::Status Unknown(CLI::App& app, const std::string& word) {
  const CLI::App& command = CommandOf(app);
  const bool option = word.starts_with("-") && word != "-";
  const bool has_commands = !command.get_subcommands([](const CLI::App*) { return true; }).empty();
  const std::string name = word.substr(0, word.find('='));
  const std::string nearest = Nearest(name, KnownWords(command, option));
  return absl::InvalidArgumentError(absl::StrCat(name, ": unknown ",
                                                 option         ? "option"
                                                 : has_commands ? "command"
                                                                : "argument",
                                                 " of ", NameOf(command),
                                                 nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"),
                                                 "; see ", NameOf(command), " --help"));
}

// Appends the words after "--" to the operands. CLI11 2.1 takes such words for options after the first operand.
absl::Status AddOperands(CLI::App& app, const std::vector<std::string>& words) {
  if (words.empty()) return absl::OkStatus();
  for (CLI::Option* const option : CommandOf(app).get_options()) {
    if (!option->get_positional()) continue;
    for (const std::string& word : words) option->add_result(word);
    option->run_callback();
    return absl::OkStatus();
  }
  return Unknown(app, words[0]);
}

}  // namespace

std::string Nearest(std::string_view word, const std::vector<std::string>& known) {
  if (word.empty() || word.size() > kLongestWord) return "";
  const std::string_view bare = word.substr(std::min(word.find_first_not_of('-'), word.size()));
  const size_t most = std::max<size_t>(1, bare.size() / 3);
  std::string nearest;
  size_t least = most + 1;
  for (const std::string& each : known) {
    const size_t distance = Distance(word, each);
    if (distance < least) {
      least = distance;
      nearest = each;
    }
  }
  if (!nearest.empty() || bare.size() < 3) return nearest;
  const auto found = std::ranges::find_if(known, [&](const std::string& each) { return each.find(bare) != each.npos; });
  return found == known.end() ? "" : *found;
}

absl::Status ParseWords(CLI::App& app, const std::vector<std::string>& words, std::optional<std::string>& printed) {
  try {
    app.require_subcommand(0, 1);
    const auto dashes = std::ranges::find(words, "--");
    app.parse(std::vector<std::string>(std::make_reverse_iterator(dashes), words.rend()));
    return AddOperands(app, {dashes == words.end() ? dashes : dashes + 1, words.end()});
  } catch (const CLI::CallForVersion& version) {
    printed = absl::StrCat(version.what(), "\n");
    return absl::OkStatus();
  } catch (const CLI::CallForHelp&) {
    printed = app.help();
    return absl::OkStatus();
  } catch (const CLI::ParseError& error) {
    // Reported before missing arguments, because the unknown word may be a misspelt one.
    const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
    if (!unknown.empty()) return Unknown(app, unknown[0]);
    return absl::InvalidArgumentError(error.what());
  }
}

std::optional<int> Parse(CLI::App& app, int argc, const char* const* argv) {
  std::optional<std::string> printed;
  const absl::Status status = ParseWords(app, {argv + std::min(argc, 1), argv + argc}, printed);
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), std::string(status.message()).c_str());
    return kBadUsage;
  }
  if (!printed) return std::nullopt;
  std::fputs(printed->c_str(), stdout);
  return Finish(app.get_name(), 0);
}

absl::Status FlushOutput() {
  errno = 0;
  const bool failed = std::fflush(stdout) != 0;
  if (!failed && std::ferror(stdout) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write to the standard output", errno == 0 ? "" : ": ",
                                             errno == 0 ? "" : std::strerror(errno)));
}

int Finish(std::string_view program, int code) {
  const absl::Status flushed = FlushOutput();
  if (flushed.ok()) return code;
  std::fprintf(stderr, "%s: %s\n", std::string(program).c_str(), std::string(flushed.message()).c_str());
  return code == 0 ? 1 : code;
}

}  // namespace ashlar::command_line
