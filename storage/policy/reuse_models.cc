// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_models.h"

#include <algorithm>

namespace ashlar::storage {

uint64_t ReuseModels::now(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.now;
}

void ReuseModels::Ended(Tenant& tenant) {
  if (++tenant.ended < std::max(kLeastRefresh, tenant.model.remembered() / kRefreshPart)) return;
  tenant.ended = 0;
  tenant.model.Refresh();
}

void ReuseModels::Came(TenantId tenant, Reuse& reuse, const Reuse* gone) {
  Tenant& of = Of(tenant);
  if (gone != nullptr && gone->kind == reuse.kind) {
    of.model.AskedForAgain(Subject(*gone), of.now - gone->used);
    Ended(of);
    reuse.uses = gone->uses + 1;
  }
  reuse.used = of.now;
}

void ReuseModels::Used(TenantId tenant, Reuse& reuse) {
  Tenant& of = Of(tenant);
  of.model.Ended(Subject(reuse), of.now - reuse.used, true);
  Ended(of);
  ++reuse.uses;
  reuse.used = of.now;
}

void ReuseModels::GivenUp(TenantId tenant, const Reuse& reuse) {
  Tenant& of = Of(tenant);
  of.model.GivenUp(Subject(reuse));
  Ended(of);
}

double ReuseModels::Rate(TenantId tenant, ReuseModel::Class model, uint64_t used) const {
  const auto found = tenants_.find(tenant);
  static const ReuseModel kUnknown;
  return found == tenants_.end() ? kUnknown.Rate(model, 0) : found->second.model.Rate(model, found->second.now - used);
}

}  // namespace ashlar::storage
