// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/offers/drain_transfer.h"

#include <algorithm>
#include <utility>

#include "daemon/peer/channels/call_failure.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr uint32_t kFetches = 3;  // failed fetches of an object before its node is excluded
constexpr int kTurns = 256;       // per call, so that others can use the thread in between

}  // namespace

void DrainTransfer::Start() {
  ++round_;
  running_ = true;
  row_ended_ = false;
  under_way_ = 0;
  again_.clear();
  nodes_.clear();
  homes_.clear();
  LookAround();
  Tick();
}

void DrainTransfer::LookAround() {
  looked_at_ = clock_.Now();
  members_ = directory_.Members();
  if (!members_.empty()) members_.erase(members_.begin());  // this node
}

void DrainTransfer::End() {
  ++round_;
  running_ = false;
  again_.clear();
}

std::optional<DrainTransfer::Transferred> DrainTransfer::Next() {
  if (!again_.empty()) {
    Transferred next = std::move(again_.front());
    again_.pop_front();
    return next;
  }
  if (row_ended_ && clock_.Now() - row_ended_at_ < options_.row_again) return std::nullopt;
  std::optional<storage::Offering> offering = cache_.offers().NextForTransfer();
  row_ended_ = !offering.has_value();
  if (row_ended_) {
    row_ended_at_ = clock_.Now();
    return std::nullopt;
  }
  return Transferred{.offering = *std::move(offering)};
}

bool DrainTransfer::MayTake(const Member& member, const Transferred& object) {
  const Node& node = nodes_[member.incarnation];
  const storage::TenantId tenant = object.offering.pool.tenant;
  return !node.out && !object.asked.contains(member.incarnation) && !node.not_shared.contains(tenant) &&
         offerer_.Shares(member, tenant);
}

bool DrainTransfer::IsFull(const Member& member, const Transferred& object) {
  const Node& node = nodes_[member.incarnation];
  const uint64_t bytes = object.offering.bytes * object.offering.shards;
  return (node.bytes > 0 && node.bytes + bytes > options_.bytes_of_a_node) || node.not_before > clock_.Now() ||
         !offerer_.MayOffer(member);
}

std::shared_ptr<const Member> DrainTransfer::HomeOf(const Transferred& object) {
  const auto home = homes_.find(object.offering.group);
  if (home == homes_.end()) return nullptr;
  const auto member = std::ranges::find(members_, home->second, &Member::incarnation);
  if (member == members_.end() || !MayTake(**member, object)) return nullptr;
  const bool silent = clock_.Now() - nodes_[home->second].answered_at > options_.home;
  return silent && IsFull(**member, object) ? nullptr : *member;
}

// Returns its group's node, or else the one with the fewest offers in flight among those that may take it. Null if it
// must wait.
std::shared_ptr<const Member> DrainTransfer::NodeFor(const Transferred& object) {
  if (const std::shared_ptr<const Member> home = HomeOf(object)) return IsFull(*home, object) ? nullptr : home;
  std::shared_ptr<const Member> best;
  for (const std::shared_ptr<const Member>& member : members_) {
    if (IsFull(*member, object) || !MayTake(*member, object)) continue;
    if (best == nullptr || nodes_[member->incarnation].bytes < nodes_[best->incarnation].bytes) best = member;
  }
  return best;
}

void DrainTransfer::Tick() {
  if (!running_) return;
  if (clock_.Now() - looked_at_ >= options_.row_again) LookAround();
  if (members_.empty()) {  // all of it falls back to the disk
    for (const Transferred& object : std::exchange(again_, {})) {
      cache_.offers().TransferEnded(object.offering.pool.tenant, object.offering.key, false);
    }
    row_ended_ = true;
    row_ended_at_ = clock_.Now();
    return;
  }
  for (int turns = 0; turns < kTurns; ++turns) {
    std::optional<Transferred> next = Next();
    if (!next.has_value()) return;
    const bool any = std::ranges::any_of(members_, [&](const auto& member) { return MayTake(*member, *next); });
    if (!any) {
      cache_.offers().TransferEnded(next->offering.pool.tenant, next->offering.key, false);
      continue;
    }
    const std::shared_ptr<const Member> to = NodeFor(*next);
    if (to == nullptr) {  // all are busy now
      again_.push_front(*std::move(next));
      return;
    }
    // Adds more objects of the same tenant.
    std::vector<Transferred> some;
    uint64_t bytes = 0, shards = 0;
    for (; next.has_value(); next = Next()) {
      const storage::Offering& offering = next->offering;
      const uint64_t more = offering.bytes * offering.shards;
      const bool fits = shards + offering.shards <= limits::kMaxPeerKeysPerCall &&
                        bytes + more <= options_.bytes_of_an_offer && !next->asked.contains(to->incarnation);
      const std::shared_ptr<const Member> home = HomeOf(*next);
      const bool others = home != nullptr && home != to;
      if (!some.empty() && (!fits || others || offering.pool.tenant != some.front().offering.pool.tenant)) break;
      bytes += more;
      shards += offering.shards;
      if (offering.group != 0) homes_[offering.group] = to->incarnation;
      some.push_back(*std::move(next));
    }
    if (next.has_value()) again_.push_front(*std::move(next));
    Offer(to, std::move(some));
  }
}

void DrainTransfer::Offer(const std::shared_ptr<const Member>& to, std::vector<Transferred> some) {
  std::vector<storage::Offering> offerings;
  if (Node& node = nodes_[to->incarnation]; node.bytes == 0) node.answered_at = clock_.Now();
  for (const Transferred& object : some) {
    offerings.push_back(object.offering);
    nodes_[to->incarnation].bytes += object.offering.bytes * object.offering.shards;
  }
  under_way_ += some.size();
  offerer_.Offer(to, offerings, OfferKind::kDrain, options_.patience_ms,
                 [this, to, round = round_, some = std::move(some)](
                     const absl::StatusOr<std::vector<TakeOutcome>>& reply) { Answered(round, to, some, reply); });
}

void DrainTransfer::Answered(uint64_t round, const std::shared_ptr<const Member>& from, std::vector<Transferred> some,
                             const absl::StatusOr<std::vector<TakeOutcome>>& reply) {
  if (round != round_) return;
  Node& node = nodes_[from->incarnation];
  node.answered_at = clock_.Now();
  const bool out = !reply.ok() && WhatFailed(reply.status()) == CallFailure::kNode;
  const bool not_shared = !reply.ok() && WhatFailed(reply.status()) == CallFailure::kTenant;
  const bool refused = !reply.ok() && WhatFailed(reply.status()) == CallFailure::kBusy;
  bool took = false, busy = refused;
  for (size_t i = 0; i < some.size(); ++i) {
    const storage::Offering& offering = some[i].offering;
    node.bytes -= offering.bytes * offering.shards;
    --under_way_;
    const TakeOutcome outcome = reply.ok() ? (*reply)[i] : TakeOutcome::kFailed;
    if (outcome == TakeOutcome::kAccepted || outcome == TakeOutcome::kAlreadyPresent) {
      took = true;
      cache_.offers().TransferEnded(offering.pool.tenant, offering.key, true);
      continue;
    }
    // After a timeout the object is still being transferred: the same node is asked again and joins the transfer. The
    // same happens after a failed fetch, which may be due to a busy machine.
    const bool fetch_failed = reply.ok() && outcome == TakeOutcome::kFailed && ++some[i].failures < kFetches;
    if (refused || outcome == TakeOutcome::kBusy || outcome == TakeOutcome::kTimedOut || fetch_failed) {
      busy = true;
    } else {
      some[i].asked.insert(from->incarnation);
      some[i].failures = 0;
    }
    again_.push_back(std::move(some[i]));
  }
  if (busy) node.not_before = clock_.Now() + options_.pause;
  if (not_shared) {
    node.not_shared.insert(some.front().offering.pool.tenant);
  } else if (took || !busy) {
    node.refusals = took ? 0 : node.refusals + 1;
  }
  // A node that does not reply, or is draining itself, takes nothing further.
  const bool stops = reply.ok() && std::ranges::count(*reply, TakeOutcome::kDraining) > 0;
  node.out |= out || stops || node.refusals >= options_.refusals;
  Tick();
}

}  // namespace ashlar::daemon
