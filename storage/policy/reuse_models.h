// SPDX-License-Identifier: Apache-2.0
// ReuseModels: the record of objects' uses, and from it the likelihood of the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "storage/policy/reuse_model.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The record of one object's uses. It is kept with the object, and with the ghost when the object has gone.
struct Reuse {
  ReuseKind kind = ReuseKind::kSegment;
  uint32_t uses = 0;       // that would have found it, had it been kept
  uint64_t used = 0;       // last, or when it came: in its tenant's requests
  float saves_a_byte = 0;  // FLOPs that having it saves, a byte
};

// A model of reuse for each tenant (reuse_model.h); time counts the tenant's requests. One thread.
class ReuseModels {
 public:
  // A request comes.
  void Tick(TenantId tenant) { ++Of(tenant).now; }
  uint64_t now(TenantId tenant) const;

  // The object was published; `gone`: the record of its earlier life, null: none. An object that was given up and is
  // computed again would have been used.
  void Came(TenantId tenant, Reuse& reuse, const Reuse* gone);
  void Used(TenantId tenant, Reuse& reuse);
  // The object was given up for others.
  void GivenUp(TenantId tenant, const Reuse& reuse);

  // Uses an expected request, of what was used last at `used`.
  double Rate(TenantId tenant, ReuseModel::Class model, uint64_t used) const;
  static ReuseModel::Class ClassOf(const Reuse& reuse) { return ReuseModel::ClassOf(Subject(reuse)); }

 private:
  // The model is looked at anew after so many spells that ended, or after a part of those that it remembers.
  static constexpr double kLeastRefresh = 64, kRefreshPart = 32;

  struct Tenant {
    ReuseModel model;
    uint64_t now = 0;
    double ended = 0;  // spells, since the model was refreshed
  };
  static ReuseModel::Subject Subject(const Reuse& reuse) { return {.kind = reuse.kind, .uses = reuse.uses}; }
  Tenant& Of(TenantId tenant) { return tenants_[tenant]; }
  static void Ended(Tenant& tenant);

  std::map<TenantId, Tenant> tenants_;
};

}  // namespace ashlar::storage
