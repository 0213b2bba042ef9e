#include "storage/policy/reuse_models.h"

#include <algorithm>

namespace ashlar::storage {

uint64_t ReuseBook::now(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.now;
}

void ReuseBook::Ended(Tenant& tenant) {
  if (++tenant.ended < std::max(kLeastRefresh, tenant.law.remembered() / kRefreshPart)) return;
  tenant.ended = 0;
  tenant.law.Refresh();
}

void ReuseBook::Came(TenantId tenant, Reuse& reuse, const Reuse* gone) {
  Tenant& of = Of(tenant);
  if (gone != nullptr && gone->kind == reuse.kind) {
    of.law.AskedForAgain(Subject(*gone), of.now - gone->used);
    Ended(of);
    reuse.uses = gone->uses + 1;
  }
  reuse.used = of.now;
}

void ReuseBook::Used(TenantId tenant, Reuse& reuse) {
  Tenant& of = Of(tenant);
  of.law.Ended(Subject(reuse), of.now - reuse.used, true);
  Ended(of);
  ++reuse.uses;
  reuse.used = of.now;
}

void ReuseBook::GivenUp(TenantId tenant, const Reuse& reuse) {
  Tenant& of = Of(tenant);
  of.law.GivenUp(Subject(reuse));
  Ended(of);
}

double ReuseBook::Rate(TenantId tenant, ReuseLaw::Class law, uint64_t used) const {
  const auto found = tenants_.find(tenant);
  static const ReuseLaw kUnknown;
  return found == tenants_.end() ? kUnknown.Rate(law, 0) : found->second.law.Rate(law, found->second.now - used);
}

}  // namespace ashlar::storage
