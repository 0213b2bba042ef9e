// SPDX-License-Identifier: Apache-2.0
// ashlarctl as a shell runs it.
#pragma once

#include <stdio.h>
#include <sys/wait.h>

#include <array>
#include <string>

namespace ashlar::integration {

struct Ended {
  int code = -1;
  std::string output;  // including errors
};

// `arguments` in the shell's words.
inline Ended RunAshlarctl(const std::string& program, const std::string& arguments, const std::string& socket) {
  const std::string command = "ASHLAR_ADMIN_SOCKET=" + socket + " " + program + " " + arguments + " 2>&1";
  Ended ended;
  FILE* pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> bytes;
  for (size_t got; (got = ::fread(bytes.data(), 1, bytes.size(), pipe)) > 0;) ended.output.append(bytes.data(), got);
  const int status = ::pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

}  // namespace ashlar::integration
