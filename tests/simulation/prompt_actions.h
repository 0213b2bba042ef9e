// SPDX-License-Identifier: Apache-2.0
// The driver's steps on exact prefixes: prompts are looked up, landed and committed, and conversations continue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "storage/testing/offered_prefixes.h"
#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/history.h"
#include "tests/simulation/landing_actions.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/prompts.h"

namespace ashlar::simulation {

class PromptActions : DriverPart {
 public:
  PromptActions(Context& context, Clients& clients, History& history, Oracle& oracle, LandingActions& landings)
      : DriverPart(context), clients_(clients), history_(history), oracle_(oracle), landings_(landings) {}

  Asked AnyPrompt(SessionId session);
  void Check(const Lease& lease, const Match& match, size_t queries);
  void Land(Lease& lease);  // `lease.asked` is set
  void Commit();
  void Operate();

  // Returns the objects of the latest commits.
  const std::deque<std::pair<TenantId, Key>>& written() const { return written_; }

 private:
  void Landed(const Landing& landing, const std::vector<MissReason>& verdict);
  void Committed(uint64_t number, const std::vector<CommitOutcome>& outcomes);
  void Remember(TenantId tenant, const storage::PrefixCommit& commit);

  Clients& clients_;
  History& history_;
  Oracle& oracle_;
  LandingActions& landings_;
  std::map<TenantId, storage::OfferedPrefixes> offered_;
  std::map<TenantId, std::deque<Prompts::Offer>> talks_;  // the latest that were committed
  std::deque<std::pair<TenantId, Key>> written_;
  uint64_t next_commit_ = 1;
};

}  // namespace ashlar::simulation
