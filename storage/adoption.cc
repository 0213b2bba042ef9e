// SPDX-License-Identifier: Apache-2.0
#include "storage/adoption.h"

#include <utility>

namespace ashlar::storage {

void Adoption::Adopt(std::vector<SsdTier::Recovered> objects, bool more) {
  pending_ = more;
  for (SsdTier::Recovered& object : objects) {
    prefixes_.Adopt(object.tenant, object.header);
    AdoptFromDisk(std::move(object));
  }
}

void Adoption::AdoptFromDisk(SsdTier::Recovered object) {
  // The disk was opened late, and the object was published meanwhile.
  if (table_.index().keys().Find(object.tenant, object.header.key, object.header.shard) != nullptr) {
    return table_.levels().ssd()->Erase(object.tenant, object.header.key, std::move(object.slot));
  }
  Entry& entry = table_.Add({object.tenant, object.pool}, std::move(object.header), 0);
  table_.index().keys().Insert(entry);
  table_.Appear(entry);
  table_.placement().copies().AdoptOnDisk(entry, std::move(object.slot));
}

bool Adoption::AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost) {
  if (table_.index().keys().Find(pool.tenant, header.key, header.shard) != nullptr) return false;
  const ObjectHeader known = header;
  Entry& entry = table_.Add(pool, std::move(header), 0);
  table_.index().keys().Insert(entry);
  table_.Appear(entry);
  table_.placement().copies().AdoptRemote(entry, copy, cost);
  prefixes_.AdoptRemote(pool.tenant, known);
  return true;
}

void Adoption::SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard) {
  if (Entry* const entry = table_.index().keys().Find(tenant, key, shard)) table_.placement().Changed(*entry);
}

bool Adoption::Knows(TenantId tenant, const Key& key) const {
  return !table_.index().keys().All(tenant, key).empty();
}

}  // namespace ashlar::storage
