// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/default_socket.h"

#include <unistd.h>

#include <cstdlib>

namespace ashlar::ctl {

std::string DefaultSocket(const char* variable, const std::string& file) {
  const char* given = std::getenv(variable);
  if (given != nullptr && *given != '\0') return given;
  std::string of_node = "/run/ashlar/" + file;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (geteuid() == 0 || runtime == nullptr || *runtime != '/' || access(of_node.c_str(), F_OK) == 0) return of_node;
  return std::string(runtime) + "/ashlar/" + file;
}

}  // namespace ashlar::ctl
