// SPDX-License-Identifier: Apache-2.0
#include <ashlar/client.h>

#include <cstdio>

int main(int, char** argv) {
  const auto client = ashlar::Client::Connect({.rpc_socket = argv[1], .session_socket = argv[2]});
  std::printf("%s\n", client.ok() ? "connected" : client.status().ToString().c_str());
}
