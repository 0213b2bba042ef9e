// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench neighbours`: what one tenant's attacks do to another tenant's match, landing and release.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace ashlar::neighbours {

struct Options {
  double seconds = 0;  // duration of each attack; the phase before it takes half as long; 0: the default
  bool quick = false;  // a few seconds, and smaller attacks
  std::string filter;  // only attacks whose names contain this
};

// Runs a private daemon for each attack, with daemon, victim and attacker as three users, so it needs root:
// FAILED_PRECONDITION otherwise. Prints a table and fills `figures`. An attack that did not happen is an error.
// OUT_OF_RANGE, with all figures: in some row the victim waited longer than the bar, or was refused.
absl::Status Run(const Options& options, nlohmann::json& figures);

// The victim and the attackers, which Run starts as this program with these arguments. Exit codes.
int RunVictim(const std::string& rpc_socket, const std::string& session_socket);
int RunAttacker(const std::string& attack, const std::string& rpc_socket, const std::string& session_socket,
                const std::string& metrics_port, bool quick);

}  // namespace ashlar::neighbours
