// SPDX-License-Identifier: Apache-2.0
// ObjectOffers: drains, and transfers of objects to and from other nodes that no engine waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include "storage/executor.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/object_table.h"
#include "storage/objects/offers.h"

namespace ashlar::storage {

class ObjectOffers final : public Offers {
 public:
  ObjectOffers(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}

  void StartDrain() override;
  void EndDrain() override;
  bool draining() const override { return draining_; }
  std::optional<Offering> NextForTransfer() override;
  void TransferEnded(TenantId tenant, const Key& key, bool accepted) override;
  void SetGroup(TenantId tenant, const Key& key, uint64_t group) override;
  std::optional<Offering> Describe(TenantId tenant, const Key& key) const override;
  TakeOutcome Judge(const Offering& offered, bool evicting) override;
  void Promote(const Offering& offered, std::function<void(bool whole)> done) override;
  void ReportArrivals() override;

 private:
  std::vector<Entry*> MemoryOnly() const;  // ordered as a drain sends them
  Reuse ReuseOf(const Entry& entry, const Offering& offered) const;

  // An offered object on its way here.
  struct Coming {
    std::vector<ObjectReference> shards;
    std::function<void(bool)> done;
  };

  ObjectTable& table_;
  const Clock& clock_;
  std::list<Coming> coming_;
  std::vector<ObjectId> to_transfer_;  // the hottest last
  bool draining_ = false;
};

}  // namespace ashlar::storage
