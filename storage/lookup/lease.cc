// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/lease.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::storage {
namespace {

// The system's random numbers, fetched in batches, because one system call per word took 1.2 µs of every grant.
class SystemRandom {
 public:
  uint64_t operator()() {
    if (left_ == 0) Fetch();
    return words_[--left_];
  }

 private:
  void Fetch() {
    // A read of up to 256 bytes is complete once the kernel is seeded; before that a signal can interrupt it.
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

LeaseTable::TenantBounds LeaseTable::BoundsOf(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  if (found != tenants_.end() && found->second.bounds) return *found->second.bounds;
  return {bounds_.tenant_leases, bounds_.tenant_segments};
}

LeaseTable::Fit LeaseTable::Fits(SessionId session, TenantId tenant, size_t segments) const {
  const auto fits = [segments](size_t leases, size_t listed, const TenantBounds& bounds) {
    return leases < bounds.leases && listed <= bounds.segments && segments <= bounds.segments - listed;
  };
  const auto own = holdings_.find(session);
  const size_t leases = own == holdings_.end() ? 0 : own->second.leases.size();
  const size_t listed = own == holdings_.end() ? 0 : own->second.segments;
  if (!fits(leases, listed, {bounds_.leases, bounds_.segments})) return Fit::kTooManyOfSession;
  const auto all = tenants_.find(tenant);
  const OfTenant none;
  const OfTenant& held = all == tenants_.end() ? none : all->second;
  return fits(held.leases, held.segments, BoundsOf(tenant)) ? Fit::kYes : Fit::kTooManyOfTenant;
}

absl::Status LeaseTable::CheckCapacity(SessionId session, TenantId tenant, size_t segments) const {
  const Fit fit = Fits(session, tenant, segments);
  if (fit == Fit::kYes) return absl::OkStatus();
  const bool own = fit == Fit::kTooManyOfSession;
  const TenantBounds bounds = own ? TenantBounds{bounds_.leases, bounds_.segments} : BoundsOf(tenant);
  return absl::ResourceExhaustedError(absl::StrCat("lease: a ", own ? "session" : "tenant", " may hold at most ",
                                                   bounds.leases, " leases with at most ", bounds.segments,
                                                   " segments"));
}

LeaseId LeaseTable::Grant(SessionId holder, TenantId tenant, LeasedObjects segments, Nanos needed_at,
                          std::vector<ObjectReference> others, const MatchedPrefix& prefix, const LeaseId& name) {
  const Serial serial = next_serial_++;
  LeaseId id = name == LeaseId{} ? DrawId(random_) : name;
  // Zeros mean "no lease". No name is used twice, whatever the random source returns.
  while (id == LeaseId{} || !serials_.emplace(id, serial).second) id = DrawId(random_);
  Lease& lease = leases_
                     .emplace(serial, Lease{.id = id,
                                            .tenant = tenant,
                                            .segments = std::move(segments),
                                            .others = std::move(others),
                                            .prefix = prefix,
                                            .holders = {},
                                            .verified = nullptr})
                     .first->second;
  SetDeadline(serial, lease, needed_at + bounds_.unused_lease);
  Hold(holder, serial, lease);
  return id;
}

const LeasedObjects* LeaseTable::Held(SessionId session, const LeaseId& id) const {
  const auto serial = serials_.find(id);
  if (serial == serials_.end()) return nullptr;
  const Lease& lease = leases_.at(serial->second);
  return Holds(session, lease) ? &lease.segments : nullptr;
}

absl::StatusOr<const LeasedObjects*> LeaseTable::Attach(SessionId session, TenantId tenant, const LeaseId& id) {
  const auto found = Find(id);
  if (found == leases_.end() || found->second.tenant != tenant) return absl::NotFoundError("lease: unknown or expired");
  auto& [serial, lease] = *found;
  if (!Holds(session, lease)) {
    if (absl::Status allowed = CheckCapacity(session, tenant, lease.Size()); !allowed.ok()) return allowed;
  }
  Hold(session, serial, lease);
  SetDeadline(serial, lease, kNever);
  return &lease.segments;
}

const LeasedObjects* LeaseTable::Peek(TenantId tenant, const LeaseId& id) const {
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
  auto& [serial, lease] = *Find(id);
  SetDeadline(serial, lease, kNever);
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
  if (lease != leases_.end() && Holds(session, lease->second)) LetGo(session, lease);
}

bool LeaseTable::ReleaseAll(SessionId session, Slice& slice) {
  for (auto held = holdings_.find(session); held != holdings_.end(); held = holdings_.find(session)) {
    if (!slice.Take()) return false;
    LetGo(session, leases_.find(*held->second.leases.begin()));
  }
  return true;
}

bool LeaseTable::Expire(Nanos now, Slice& slice) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    if (!slice.Take()) return false;
    // No process attached to the unused lease: its first holder is the only one.
    const auto lease = leases_.find(deadlines_.begin()->second);
    LetGo(lease->second.holders.front(), lease);
  }
  return true;
}

void LeaseTable::GiveBack(TenantId tenant, LeasedObjects segments, std::vector<ObjectReference> others) {
  if (segments.empty() && others.empty()) return;
  ended_[tenant].push_back({.others = std::move(others), .segments = std::move(segments)});
}

bool LeaseTable::Settle(TenantId tenant, Slice& slice) {
  const auto found = ended_.find(tenant);
  if (found == ended_.end()) return true;
  for (std::deque<Ended>& ended = found->second; !ended.empty(); ended.pop_front()) {
    Ended& first = ended.front();
    const size_t others = first.others.size(), all = others + first.segments.size();
    for (; first.settled < all; ++first.settled) {
      if (!slice.Take()) return false;
      ObjectReference& reference =
          first.settled < others ? first.others[first.settled] : first.segments[first.settled - others].object;
      reference = {};
    }
  }
  ended_.erase(found);
  return true;
}

bool LeaseTable::SettleAll(Slice& slice) {
  while (!ended_.empty()) {
    if (!Settle(ended_.begin()->first, slice)) return false;
  }
  return true;
}

LeaseTable::Leases::iterator LeaseTable::Find(const LeaseId& id) {
  const auto serial = serials_.find(id);
  return serial == serials_.end() ? leases_.end() : leases_.find(serial->second);
}

bool LeaseTable::Holds(SessionId session, const Lease& lease) {
  return std::ranges::find(lease.holders, session) != lease.holders.end();
}

void LeaseTable::Hold(SessionId session, Serial serial, Lease& lease) {
  if (Holds(session, lease)) return;
  lease.holders.push_back(session);
  Holding& holding = holdings_[session];
  holding.leases.insert(serial);
  holding.segments += lease.Size();
  OfTenant& all = tenants_[lease.tenant];
  ++all.leases;
  all.segments += lease.Size();
}

void LeaseTable::LetGo(SessionId session, Leases::iterator found) {
  auto& [serial, lease] = *found;
  const auto held = holdings_.find(session);
  held->second.leases.erase(serial);
  held->second.segments -= lease.Size();
  if (held->second.leases.empty()) holdings_.erase(held);
  OfTenant& all = tenants_.at(lease.tenant);
  --all.leases;
  all.segments -= lease.Size();
  lease.holders.erase(std::ranges::find(lease.holders, session));
  if (!lease.holders.empty()) return;
  SetDeadline(serial, lease, kNever);
  serials_.erase(lease.id);
  GiveBack(lease.tenant, std::move(lease.segments), std::move(lease.others));
  leases_.erase(found);
}

void LeaseTable::SetDeadline(Serial serial, Lease& lease, Nanos deadline) {
  if (lease.deadline != kNever) deadlines_.erase({lease.deadline, serial});
  lease.deadline = deadline;
  if (deadline != kNever) deadlines_.emplace(deadline, serial);
}

}  // namespace ashlar::storage
