// SPDX-License-Identifier: Apache-2.0
// Oracle: checks the cache's promises about segments, leases, deadlines and budgets.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/history.h"

namespace ashlar::simulation {

using storage::ExtentRun;
using storage::Found;

class Oracle : DriverPart {
 public:
  Oracle(Context& context, Clients& clients, History& history)
      : DriverPart(context), clients_(clients), history_(history) {}

  // `used`: a lookup found it, or it was offered again, at that time or later. None: the use may not count.
  void CheckHit(const Text& text, const Found& found, std::optional<Nanos> used);
  void CheckUse(const Text& text, std::optional<Nanos> used);
  void CheckMiss(const Text& text, MissReason reason, Nanos recompute = 0);
  void CheckNotErased(const Text& text, uint64_t begun_at_step);
  void CheckErased();
  void CheckSpace(TenantId tenant, uint64_t extents);
  void CheckDeadlines();
  void CheckExpired();
  void CheckBudgets();
  void CheckLeases();
  void CheckTurns();

  bool IsThere(const Text& text);
  // Returns whether the tenant can certainly begin a landing or a composition.
  bool MayBegin(TenantId tenant) const;
  bool SomethingIsOverdue();
  Nanos DeadlineOf(const Reservation& reservation) const;
  bool Corrupted(TenantId tenant) const {
    return world_.disk.counts().bit_flips > 0 || history_.half_erased.contains(tenant);
  }
  bool TierFailed() const { return history_.hung || !world_.observer.tier_errors.empty(); }
  void Crashed() { arena_tenants_.clear(); }

 private:
  bool Leased(const Text& text);
  bool InUse(const Text& text);
  bool IsPast(const std::map<Text, Nanos>& used, const Text& text) const;
  bool IsThereTooLong(const Text& text);

  Clients& clients_;
  History& history_;
  std::map<uint32_t, TenantId> arena_tenants_;
};

}  // namespace ashlar::simulation
