// SPDX-License-Identifier: Apache-2.0
// Command lines of the tools. CLI11 parses them; this adds the answers that all tools have in common.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/App.hpp"
#include "absl/status/status.h"

namespace ashlar::command_line {

inline constexpr int kBadUsage = 2;

// Parses `words`, the arguments without the program's name, into the variables bound to `app`. INVALID_ARGUMENT names
// the argument and, if it is unknown, the known one that is nearest. With --help or --version: OK, and `printed` has
// the text to print instead of running. The operands of a command are one vector, and none of them is required: the
// program counts them.
absl::Status ParseWords(CLI::App& app, const std::vector<std::string>& words, std::optional<std::string>& printed);

// ParseWords for main(). Prints help, version or error. Returns the exit code if the program ends here: 0, kBadUsage,
// or 1 if the help could not be written.
std::optional<int> Parse(CLI::App& app, int argc, const char* const* argv);

// Flushes the standard output. Returns UNAVAILABLE if anything that was printed could not be written.
absl::Status FlushOutput();
// Exit code of a program that would end with `code`: 1, with a message, if its output could not be written.
int Finish(std::string_view program, int code);

// Returns the known word that `word` was probably meant to be; empty if none is similar.
std::string Nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace ashlar::command_line
