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
  Lease lease{.id = id, .tenant = tenant, .segments = std::move(segments), .deadline = now + unused_lease_};
  Hold(holder, serial, leases_.emplace(serial, std::move(lease)).first->second);
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
  Hold(session, lease->first, lease->second);
  lease->second.deadline.reset();
  return &lease->second.segments;
}

void LeaseTable::Use(const LeaseId& id) {
  Find(id)->second.deadline.reset();
}

void LeaseTable::Release(SessionId session, const LeaseId& id) {
  const auto lease = Find(id);
  if (lease != leases_.end() && lease->second.holders.contains(session)) LetGo(session, lease);
}

void LeaseTable::ReleaseAll(SessionId session) {
  const auto held = holdings_.extract(session);
  if (held.empty()) return;
  for (const Serial serial : held.mapped()) LetGo(session, leases_.find(serial));
}

void LeaseTable::Expire(Nanos now) {
  for (auto next = leases_.begin(); next != leases_.end();) {
    const auto lease = next++;
    const auto& deadline = lease->second.deadline;
    // Nobody attached to a lease that was never used: its first holder is the only one.
    if (deadline && *deadline <= now) LetGo(*lease->second.holders.begin(), lease);
  }
}

size_t LeaseTable::HeldBy(SessionId session) const {
  const auto held = holdings_.find(session);
  return held == holdings_.end() ? 0 : held->second.size();
}

LeaseTable::Leases::iterator LeaseTable::Find(const LeaseId& id) {
  const auto serial = serials_.find(id);
  return serial == serials_.end() ? leases_.end() : leases_.find(serial->second);
}

void LeaseTable::Hold(SessionId session, Serial serial, Lease& lease) {
  lease.holders.insert(session);
  holdings_[session].insert(serial);
}

void LeaseTable::LetGo(SessionId session, Leases::iterator lease) {
  if (const auto held = holdings_.find(session); held != holdings_.end()) {
    held->second.erase(lease->first);
    if (held->second.empty()) holdings_.erase(held);
  }
  lease->second.holders.erase(session);
  if (!lease->second.holders.empty()) return;
  serials_.erase(lease->second.id);
  leases_.erase(lease);
}

}  // namespace ashlar::storage
