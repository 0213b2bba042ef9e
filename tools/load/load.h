// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench load`: time to first token and throughput of several engine processes under load (HYPIC Fig. 11's
// shape).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace ashlar::load {

struct LoadOptions {
  int engines = 0;     // processes, of one thread each; 0: the machine's cores
  double seconds = 8;  // seconds of arrivals per rate
  bool quick = false;  // few short points, to check that the program works
  uint64_t seed = 1;   // seed of arrivals
};

// Requests arrive in a Poisson stream and wait in one queue for the next free engine. Rates are swept for each way of
// serving until it no longer keeps up. Every request counts, from its arrival. Fills `figures` and prints a table.
absl::Status Run(const LoadOptions& options, nlohmann::json& figures);

// An engine process: prints "ready", then serves one prompt for each number on standard input, and answers on standard
// output. `way`: full, prefix or ashlar; the sockets are a daemon's, only for ashlar. Returns the exit code.
int RunEngine(const std::string& way, const std::string& rpc_socket, const std::string& session_socket);

}  // namespace ashlar::load
