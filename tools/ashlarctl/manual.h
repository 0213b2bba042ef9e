// What ashlarctl says of itself, all made of the table of commands: help, the manual page, completion scripts.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {

std::string Usage();                       // all commands, a line each
std::string Help(const Command& command);  // one command and its options
std::string ManualPage();                  // troff, for man(1)
// `shell`: bash, zsh or fish.
std::string CompletionScript(const std::string& shell);

absl::StatusOr<Answer> Completion(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Manual(const Arguments& arguments, AdminClient& client);

}  // namespace ashlar::ctl
