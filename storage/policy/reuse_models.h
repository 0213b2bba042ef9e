// SPDX-License-Identifier: Apache-2.0
// ReuseModels: records uses of objects and predicts the next use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "storage/policy/reuse_model.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The record of one object's uses. It is kept with the object, and later with its ghost.
struct Reuse {
  ReuseKind kind = ReuseKind::kSegment;
  uint32_t uses = 0;       // uses, including those that would have found it if it had been kept
  uint64_t used = 0;       // last use or arrival, in requests of its tenant
  float saves_a_byte = 0;  // FLOPs saved per byte
};

// A reuse model per tenant (reuse_model.h). Time counts the tenant's requests. One thread only.
class ReuseModels {
 public:
  // A request arrived.
  void Tick(TenantId tenant) { ++Of(tenant).now; }
  uint64_t now(TenantId tenant) const;

  // The object was published. `gone` is the record of its earlier life; null without one. Recomputing an evicted object
  // counts as a missed use.
  void Came(TenantId tenant, Reuse& reuse, const Reuse* gone);
  void Used(TenantId tenant, Reuse& reuse);
  // The object was evicted for others.
  void GivenUp(TenantId tenant, const Reuse& reuse);

  // Expected uses per request of an object last used at `used`.
  double Rate(TenantId tenant, ReuseModel::Class model, uint64_t used) const;
  static ReuseModel::Class ClassOf(const Reuse& reuse) { return ReuseModel::ClassOf(Subject(reuse)); }

 private:
  // The model is refreshed after this many ended spells, or this fraction of the remembered ones.
  static constexpr double kLeastRefresh = 64, kRefreshPart = 32;

  struct Tenant {
    ReuseModel model;
    uint64_t now = 0;
    double ended = 0;  // spells since the last refresh
  };
  static ReuseModel::Subject Subject(const Reuse& reuse) { return {.kind = reuse.kind, .uses = reuse.uses}; }
  Tenant& Of(TenantId tenant) { return tenants_[tenant]; }
  static void Ended(Tenant& tenant);

  std::map<TenantId, Tenant> tenants_;
};

}  // namespace ashlar::storage
