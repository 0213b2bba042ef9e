#include "storage/lease.h"

#include <sys/random.h>

#include <array>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::storage {
namespace {

// The system's randomness, fetched for many names at a time: a system call for each word took 1.2 µs of every grant.
class SystemRandom {
 public:
  uint64_t operator()() {
    if (left_ == 0) Fetch();
    return words_[--left_];
  }

 private:
  void Fetch() {
    // Up to 256 bytes come whole once the kernel has been seeded; only a signal before that can interrupt.
    static_assert(sizeof words_ <= 256);
    while (getrandom(words_.data(), sizeof words_, 0) != sizeof words_) {
    }
    left_ = words_.size();
  }

  std::array<uint64_t, 32> words_;
  size_t left_ = 0;
};

LeaseId DrawId(const std::function<uint64_t()>& random) {
  const uint64_t words[2] = {random(), random()};
  LeaseId id;
  std::memcpy(id.data(), words, sizeof words);
  return id;
}

}  // namespace

LeaseTable::LeaseTable(std::function<uint64_t()> random, Bounds bounds)
    : random_(random ? std::move(random) : SystemRandom()), bounds_(bounds) {}

bool LeaseTable::HasRoom(SessionId session, size_t segments) const {
  const auto found = holdings_.find(session);
  const size_t leases = found == holdings_.end() ? 0 : found->second.leases.size();
  const size_t listed = found == holdings_.end() ? 0 : found->second.segments;
  return leases < bounds_.leases && segments <= bounds_.segments - listed;
}

LeaseId LeaseTable::Grant(SessionId holder, TenantId tenant, Segments segments, Nanos needed_at,
                          std::vector<Pool::Reference> others, const MatchedPrefix& prefix, const LeaseId& name) {
  const Serial serial = next_serial_++;
  LeaseId id = name == LeaseId{} ? DrawId(random_) : name;
  // All zero means "no lease"; a name in use is not given twice, whatever the source of randomness.
  while (id == LeaseId{} || !serials_.emplace(id, serial).second) id = DrawId(random_);
  Lease lease{.id = id,
              .tenant = tenant,
              .segments = std::move(segments),
              .others = std::move(others),
              .prefix = prefix,
              .deadline = needed_at + bounds_.unused_lease};
  Hold(holder, serial, leases_.emplace(serial, std::move(lease)).first->second);
  return id;
}

const LeaseTable::Segments* LeaseTable::Held(SessionId session, const LeaseId& id) const {
  const auto serial = serials_.find(id);
  if (serial == serials_.end()) return nullptr;
  const Lease& lease = leases_.at(serial->second);
  return lease.holders.contains(session) ? &lease.segments : nullptr;
}

absl::StatusOr<const LeaseTable::Segments*> LeaseTable::Attach(SessionId session, TenantId tenant, const LeaseId& id) {
  const auto lease = Find(id);
  if (lease == leases_.end() || lease->second.tenant != tenant) return absl::NotFoundError("lease: unknown");
  if (!lease->second.holders.contains(session) && !HasRoom(session, lease->second.Size())) {
    return absl::ResourceExhaustedError(absl::StrCat("lease: a session holds at most ", bounds_.leases,
                                                     " leases, which list at most ", bounds_.segments, " segments"));
  }
  Hold(session, lease->first, lease->second);
  lease->second.deadline.reset();
  return &lease->second.segments;
}

const LeaseTable::Segments* LeaseTable::Peek(TenantId tenant, const LeaseId& id) const {
  const auto serial = serials_.find(id);
  if (serial == serials_.end()) return nullptr;
  const Lease& lease = leases_.at(serial->second);
  return lease.tenant == tenant ? &lease.segments : nullptr;
}

const MatchedPrefix* LeaseTable::Prefix(const LeaseId& id) const {
  const auto serial = serials_.find(id);
  return serial == serials_.end() ? nullptr : &leases_.at(serial->second).prefix;
}

void LeaseTable::Use(const LeaseId& id, bool composed) {
  Lease& lease = Find(id)->second;
  lease.deadline.reset();
  lease.composed |= composed;
}

bool LeaseTable::Composed(const LeaseId& id) const {
  const auto serial = serials_.find(id);
  return serial != serials_.end() && leases_.at(serial->second).composed;
}

std::shared_ptr<VerifiedLayers> LeaseTable::Verified(const LeaseId& id) {
  Lease& lease = Find(id)->second;
  if (lease.verified == nullptr) lease.verified = std::make_shared<VerifiedLayers>(lease.segments.size());
  return lease.verified;
}

void LeaseTable::Release(SessionId session, const LeaseId& id) {
  const auto lease = Find(id);
  if (lease != leases_.end() && lease->second.holders.contains(session)) LetGo(session, lease);
}

void LeaseTable::ReleaseAll(SessionId session) {
  const auto held = holdings_.extract(session);
  if (held.empty()) return;
  for (const Serial serial : held.mapped().leases) LetGo(session, leases_.find(serial));
}

void LeaseTable::Expire(Nanos now) {
  for (auto next = leases_.begin(); next != leases_.end();) {
    const auto lease = next++;
    const auto& deadline = lease->second.deadline;
    // Nobody attached to a lease that was never used: its first holder is the only one.
    if (deadline && *deadline <= now) LetGo(*lease->second.holders.begin(), lease);
  }
}

LeaseTable::Leases::iterator LeaseTable::Find(const LeaseId& id) {
  const auto serial = serials_.find(id);
  return serial == serials_.end() ? leases_.end() : leases_.find(serial->second);
}

void LeaseTable::Hold(SessionId session, Serial serial, Lease& lease) {
  if (!lease.holders.insert(session).second) return;
  Holding& holding = holdings_[session];
  holding.leases.insert(serial);
  holding.segments += lease.Size();
}

void LeaseTable::LetGo(SessionId session, Leases::iterator lease) {
  if (const auto held = holdings_.find(session); held != holdings_.end()) {
    held->second.leases.erase(lease->first);
    held->second.segments -= lease->second.Size();
    if (held->second.leases.empty()) holdings_.erase(held);
  }
  lease->second.holders.erase(session);
  if (!lease->second.holders.empty()) return;
  serials_.erase(lease->second.id);
  leases_.erase(lease);
}

}  // namespace ashlar::storage
