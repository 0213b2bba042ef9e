// SPDX-License-Identifier: Apache-2.0
// The help, the manual page and the completion scripts of ashlarctl, all made from the table of commands.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {

std::string Usage();                       // all commands, one per line
std::string Help(const Command& command);  // help of one command and its options
std::string ManualPage();                  // troff, for man(1)
// `shell`: bash, zsh or fish.
std::string CompletionScript(const std::string& shell);

absl::StatusOr<Answer> Completion(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Manual(const Arguments& arguments, AdminClient& client);

}  // namespace ashlar::ctl
