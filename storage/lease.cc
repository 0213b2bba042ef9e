#include "storage/lease.h"

#include <sys/random.h>

#include <cstring>
#include <utility>

namespace ashlar::storage {
namespace {

uint64_t SystemRandom() {
  uint64_t word = 0;
  // Up to 256 bytes come whole once the kernel has been seeded; only a signal before that can interrupt.
  while (getrandom(&word, sizeof word, 0) != sizeof word) {
  }
  return word;
}

LeaseId DrawId(const std::function<uint64_t()>& random) {
  const uint64_t words[2] = {random(), random()};
  LeaseId id;
  std::memcpy(id.data(), words, sizeof words);
  return id;
}

}  // namespace

LeaseTable::LeaseTable(std::function<uint64_t()> random, Nanos unused_lease)
    : random_(random ? std::move(random) : SystemRandom), unused_lease_(unused_lease) {}

LeaseId LeaseTable::Grant(SessionId holder, TenantId tenant, Segments segments, Nanos now) {
  const Serial serial = next_serial_++;
  LeaseId id = DrawId(random_);
  // All zero means "no lease"; a name in use is not given twice, whatever the source of randomness.
  while (id == LeaseId{} || !serials_.emplace(id, serial).second) id = DrawId(random_);
  leases_.emplace(serial, Lease{.id = id,
                                .tenant = tenant,
                                .segments = std::move(segments),
                                .holders = {holder},
                                .deadline = now + unused_lease_});
  return id;
}

const LeaseTable::Segments* LeaseTable::Held(SessionId session, const LeaseId& id) const {
  const auto serial = serials_.find(id);
  if (serial == serials_.end()) return nullptr;
  const Lease& lease = leases_.at(serial->second);
  return lease.holders.contains(session) ? &lease.segments : nullptr;
}

const LeaseTable::Segments* LeaseTable::Attach(SessionId session, TenantId tenant, const LeaseId& id) {
  const auto lease = Find(id);
  if (lease == leases_.end() || lease->second.tenant != tenant) return nullptr;
  lease->second.holders.insert(session);
  lease->second.deadline.reset();
  return &lease->second.segments;
}

void LeaseTable::Use(const LeaseId& id) {
  Find(id)->second.deadline.reset();
}

void LeaseTable::Release(SessionId session, const LeaseId& id) {
  if (const auto lease = Find(id); lease != leases_.end()) Release(session, lease);
}

void LeaseTable::ReleaseAll(SessionId session) {
  for (auto lease = leases_.begin(); lease != leases_.end();) lease = Release(session, lease);
}

void LeaseTable::Expire(Nanos now) {
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto& deadline = lease->second.deadline;
    lease = deadline && *deadline <= now ? End(lease) : std::next(lease);
  }
}

LeaseTable::Leases::iterator LeaseTable::Find(const LeaseId& id) {
  const auto serial = serials_.find(id);
  return serial == serials_.end() ? leases_.end() : leases_.find(serial->second);
}

LeaseTable::Leases::iterator LeaseTable::Release(SessionId session, Leases::iterator lease) {
  const bool was_holder = lease->second.holders.erase(session) > 0;
  return was_holder && lease->second.holders.empty() ? End(lease) : std::next(lease);
}

LeaseTable::Leases::iterator LeaseTable::End(Leases::iterator lease) {
  serials_.erase(lease->second.id);
  return leases_.erase(lease);
}

}  // namespace ashlar::storage
