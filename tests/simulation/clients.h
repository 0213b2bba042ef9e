// SPDX-License-Identifier: Apache-2.0
// Clients: the sessions of one simulation, and everything that they hold or have in progress.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "storage/lookup/search.h"
#include "storage/testing/tokens.h"
#include "tests/simulation/context.h"

namespace ashlar::simulation {

using storage::LandingId;
using storage::LeaseId;
using storage::Match;
using storage::TestPages;
using storage::Tokens;

struct Reservation {
  SessionId session;
  storage::ReservationId id;
  Text text;
  Nanos reserved_at;
  bool publishing = false;
};
// A prompt as requested, and the prefix from which it may resume.
struct Asked {
  Tokens tokens;
  ConversationId conversation{};
  Match match;  // its spans and pointers are valid as long as the lease
};
struct Lease {
  SessionId session;
  LeaseId id;
  std::vector<Text> texts;        // the texts that it lists
  std::optional<Nanos> deadline;  // none: it was used
  bool composed = false;          // segments, or composed states, were landed from it
  std::optional<Asked> asked;
};
// A lookup in progress.
struct Searching {
  Lease lease;  // the lease to be granted if something is found
  std::vector<Text> texts;
  std::vector<storage::Query> queries;  // the queries
  std::optional<storage::PrefixText> prompt;
  Nanos begun = 0, needed_at = 0;
  uint64_t begun_at_step = 0;
  bool drains = false;  // whether the cache was draining when it began
  std::shared_ptr<bool> waits = std::make_shared<bool>(false);
  std::unique_ptr<storage::Search> search;  // refers to the members above
};
struct Closing {
  SessionId session;
  std::function<void()> drained;
};
struct Landing {
  using Ended = std::function<void(const Landing&, const std::vector<MissReason>& verdict)>;
  SessionId session;
  std::vector<Text> texts;  // landed segments; empty if `asked` is set
  std::optional<Asked> asked;
  LeaseId lease{};
  bool cancelled = false;
  std::unique_ptr<TestPages> pages;
  Ended ended;  // checks the verdict
};
struct Composing {
  SessionId session;
  std::vector<Text> texts;
  uint32_t layer = 0;
  bool cancelled = false;
  std::shared_ptr<std::vector<float>> state;
};
struct Committing {
  SessionId session;
  bool refused = false;  // must be refused: it is called exact, but is not
  bool spanning = false;
};

struct Clients {
  // Marks a lease as used: its deadline no longer ends it.
  void Use(const LeaseId& id, bool composed);
  uint64_t InFlight(TenantId tenant) const;  // landings and compositions
  bool SomethingEnds() const;                // something that has ended may still hold space
  // As if the daemon is killed: drops the calls in slices, or everything else.
  void DropSlices();
  void DropAll();

  SessionId next_session = 1;
  LandingId next_landing = 1;  // also of compositions
  std::vector<SessionId> sessions;
  std::vector<Reservation> reservations;
  std::map<SessionId, Nanos> progress;  // the last publish of each session
  std::vector<Lease> leases;
  std::list<Searching> searches;
  std::vector<SessionId> releasing;  // sessions whose ended leases still have references
  std::vector<Closing> closing;
  bool ticks = false, ticked_in_parts = false;
  std::map<LandingId, Landing> landings;
  std::map<LandingId, Composing> compositions;
  std::map<uint64_t, Committing> commits;
  uint64_t draining = 0;
};

}  // namespace ashlar::simulation
