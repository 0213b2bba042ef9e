// SPDX-License-Identifier: Apache-2.0
// Victim and attacker as processes: each answers every line of its input with one line.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tools/neighbours/attack.h"
#include "tools/neighbours/neighbours.h"
#include "tools/neighbours/victim.h"

namespace ashlar::neighbours {
namespace {

int Fail(const char* role, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", role, status.ToString().c_str());
  return 1;
}

void Say(const std::string& line) {
  std::cout << line << std::endl;
}

}  // namespace

// "SECONDS NEWCOMERS PORT": measures for SECONDS, with newcomers or without (1, 0), scraping that port or none (0).
int RunVictim(const std::string& rpc_socket, const std::string& session_socket) {
  const auto victim = Victim::Open({.rpc_socket = rpc_socket, .session_socket = session_socket});
  if (!victim.ok()) return Fail("victim", victim.status());
  Say("ready");
  double seconds;
  int newcomers;
  for (uint16_t port; std::cin >> seconds >> newcomers >> port;) {
    const std::chrono::duration<double> span(seconds);
    Say((*victim)->Measure(span, {.any = newcomers != 0, .metrics_port = port}).dump());
  }
  return 0;
}

// For each line, attacks until the next line or the end of input, and prints what it achieved.
int RunAttacker(const std::string& attack, const std::string& rpc_socket, const std::string& session_socket,
                const std::string& metrics_port, bool quick) {
  Target target;
  target.daemon.rpc_socket = rpc_socket;
  target.daemon.session_socket = session_socket;
  target.metrics_port = static_cast<uint16_t>(std::strtoul(metrics_port.c_str(), nullptr, 10));
  for (const AttackKind& kind : Attacks()) {
    if (attack != kind.name) continue;
    const std::unique_ptr<Attack> made = kind.make(target, quick);
    if (absl::Status status = made->Prepare(); !status.ok()) return Fail("attacker", status);
    Say("ready");
    std::string line;
    std::getline(std::cin, line);
    Achieved achieved;
    {
      std::jthread attacking([&](const std::stop_token& stop) { achieved = made->Run(stop); });
      std::getline(std::cin, line);
    }
    const nlohmann::json figures = {{"sessions", achieved.sessions},
                                    {"asked", achieved.asked},
                                    {"granted", achieved.granted},
                                    {"refused", achieved.refused},
                                    {"most_at_a_time", achieved.most_at_a_time},
                                    {"why", achieved.why}};
    Say(figures.dump());
    return 0;
  }
  return Fail("attacker", absl::InvalidArgumentError(absl::StrCat("attack: ", attack, " is unknown")));
}

}  // namespace ashlar::neighbours
