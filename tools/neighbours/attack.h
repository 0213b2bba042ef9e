// SPDX-License-Identifier: Apache-2.0
// Attack: one tenant's attacks on a daemon, which must not affect other tenants. Each is as strong as a process of that
// tenant can make it, and reports how much it achieved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "client/session/client.h"

namespace ashlar::neighbours {

struct Target {
  ClientOptions daemon;
  uint16_t metrics_port = 0;
};

// The amounts that an attack achieved, in its own units: an idle attack would prove nothing.
struct Achieved {
  uint64_t sessions = 0;        // sessions or connections that the attack held
  uint64_t asked = 0;           // requests
  uint64_t granted = 0;         // regions, replies, segments, bytes, leases, models, …
  uint64_t refused = 0;         // requests
  uint64_t most_at_a_time = 0;  // requests that waited for an answer
  std::string why;              // reason of the first refusal
};

class Attack {
 public:
  virtual ~Attack() = default;
  // Prepares the attack: sessions, a segment to land. An error here is the bench's, not the daemon's.
  virtual absl::Status Prepare() = 0;
  // Runs until told to stop, and returns soon afterwards.
  virtual Achieved Run(const std::stop_token& stop) = 0;
};

struct AttackKind {
  const char* name;
  const char* what;  // the units of `granted`
  std::unique_ptr<Attack> (*make)(const Target& target, bool quick);
  // With fewer requests than `asked`, or fewer at a time, it was not an attack.
  uint64_t least_asked, least_at_a_time;
  uint64_t quick_least_asked, quick_least_at_a_time;
};
std::span<const AttackKind> Attacks();

// On the session socket.
std::unique_ptr<Attack> MakeMappings(const Target& target, bool quick);
std::unique_ptr<Attack> MakeUnreadReplies(const Target& target, bool quick);
// By RPC.
std::unique_ptr<Attack> MakeLookups(const Target& target, bool quick);
std::unique_ptr<Attack> MakeLandings(const Target& target, bool quick);
std::unique_ptr<Attack> MakeLeases(const Target& target, bool quick);
std::unique_ptr<Attack> MakeModels(const Target& target, bool quick);
std::unique_ptr<Attack> MakeCommits(const Target& target, bool quick);
// On the metrics endpoint.
std::unique_ptr<Attack> MakeMetrics(const Target& target, bool quick);

}  // namespace ashlar::neighbours
