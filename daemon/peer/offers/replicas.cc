// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/offers/replicas.h"

#include <algorithm>
#include <optional>
#include <span>

#include "daemon/peer/channels/call_failure.h"
#include "proto/limits.h"

namespace ashlar::daemon {

void Replicas::Asked(const std::string& node, storage::TenantId tenant, const Key& key) {
  if (options_.bytes_per_second == 0) return;
  const storage::Nanos now = clock_.Now();
  if (demand_.size() >= options_.objects && !demand_.contains({tenant, key})) Erase(now);
  if (demand_.size() >= options_.objects && !demand_.contains({tenant, key})) return;
  Demand& demand = demand_[{tenant, key}];
  std::erase_if(demand.askers, [&](const auto& asker) { return now - asker.second > options_.window; });
  if (demand.askers.size() >= kMostAskers && !demand.askers.contains(node)) return;
  const bool first = !demand.askers.contains(node);
  demand.askers[node] = demand.asked_at = now;
  if (!first || demand.waits || demand.askers.size() < options_.askers || waiting_.size() >= options_.waiting) return;
  Wait({tenant, key});
}

void Replicas::Wait(const Place& place) {
  demand_[place].waits = true;
  waiting_.push_back(place);
}

// At most once a second, because it walks over all entries.
void Replicas::Erase(storage::Nanos now) {
  if (now - erased_at_ < 1'000'000'000) return;
  erased_at_ = now;
  std::erase_if(demand_,
                [&](const auto& one) { return !one.second.waits && now - one.second.asked_at > options_.window; });
}

bool Replicas::Paused(const Member& member, storage::TenantId tenant) const {
  const auto until = not_before_.find({member.incarnation, tenant});
  return until != not_before_.end() && until->second > clock_.Now();
}

void Replicas::Pause(const Member& member, storage::TenantId tenant, storage::Nanos time) {
  if (not_before_.size() > kMostPaused) not_before_.clear();
  not_before_[{member.incarnation, tenant}] = clock_.Now() + time;
}

// Returns whether the node neither has nor requested the object, shares the tenant, and had space recently.
bool Replicas::Wants(const Member& member, const storage::Offering& offering) const {
  const storage::TenantId tenant = offering.pool.tenant;
  if (Paused(member, tenant) || Paused(member, storage::kNoTenant) || !offerer_.Shares(member, tenant)) return false;
  if (demand_.at(PlaceOf(offering)).askers.contains(member.node)) return false;
  return std::ranges::none_of(directory_.Locate(offering.ns, std::span(&offering.key, 1)), [&](const Located& located) {
    return located.member->incarnation == member.incarnation;
  });
}

// Takes turns among nodes. Null if the nodes that want it are busy.
std::optional<std::shared_ptr<const Member>> Replicas::NodeFor(const storage::Offering& offering) {
  const std::vector<std::shared_ptr<const Member>> members = directory_.Members();
  bool any = false;
  for (size_t i = 1; i < members.size(); ++i) {  // this node is the first
    const std::shared_ptr<const Member>& member = members[1 + (turn_ + i) % (members.size() - 1)];
    if (!Wants(*member, offering)) continue;
    any = true;
    const auto busy = busy_until_.find(member->incarnation);
    const bool is_busy = busy != busy_until_.end() && busy->second > clock_.Now();
    if (is_busy || !offerer_.MayOffer(*member)) continue;
    ++turn_;
    return member;
  }
  return any ? std::optional(std::shared_ptr<const Member>()) : std::nullopt;
}

// Removes entries that are no longer to be offered.
std::optional<storage::Offering> Replicas::Next() {
  while (!waiting_.empty()) {
    const auto [tenant, key] = waiting_.front();
    std::optional<storage::Offering> offering = cache_.offers().Describe(tenant, key);
    if (offering.has_value() && !cache_.offers().draining()) return offering;
    demand_[waiting_.front()].waits = false;
    waiting_.pop_front();
  }
  return std::nullopt;
}

void Replicas::Tick() {
  const storage::Nanos now = clock_.Now();
  const auto rate = static_cast<double>(options_.bytes_per_second);
  if (allowed_at_ > 0) allowance_ += rate * static_cast<double>(now - allowed_at_) / 1e9;
  allowance_ = std::min(allowance_, rate);  // at most one second's worth
  allowed_at_ = now;
  for (size_t tries = 0; tries < kTries && allowance_ > 0; ++tries) {
    std::optional<storage::Offering> next = Next();
    if (!next.has_value()) return;
    const std::optional<std::shared_ptr<const Member>> to = NodeFor(*next);
    if (!to.has_value() || *to == nullptr) {
      demand_[waiting_.front()].waits = to.has_value();
      if (to.has_value()) waiting_.push_back(waiting_.front());
      waiting_.pop_front();
      continue;
    }
    // Adds more objects of the same tenant.
    const storage::TenantId tenant = next->pool.tenant;
    std::vector<storage::Offering> some;
    for (uint64_t shards = 0; next.has_value() && allowance_ > 0; next = Next()) {
      shards += next->shards;
      const bool fits = shards <= limits::kMaxPeerKeysPerCall && next->pool.tenant == tenant && Wants(**to, *next);
      if (!some.empty() && !fits) break;
      allowance_ -= static_cast<double>(next->bytes * next->shards);
      demand_[waiting_.front()].waits = false;
      waiting_.pop_front();
      some.push_back(*std::move(next));
    }
    Offer(*to, std::move(some));
  }
}

// The receiving node opens objects like any requester, so it is counted as one first.
void Replicas::Offer(const std::shared_ptr<const Member>& to, std::vector<storage::Offering> offerings) {
  const storage::Nanos now = clock_.Now();
  std::vector<Copy> copies;
  for (const storage::Offering& offering : offerings) {
    Demand& demand = demand_[PlaceOf(offering)];
    const bool marked = demand.askers.size() < kMostAskers;
    if (marked) demand.askers[to->node] = now;
    copies.push_back({offering, marked ? now : 0});
  }
  offerer_.Offer(to, offerings, OfferKind::kHot, options_.patience_ms,
                 [this, to, copies = std::move(copies)](const absl::StatusOr<std::vector<TakeOutcome>>& reply) {
                   Answered(to, copies, reply);
                 });
}

void Replicas::Answered(const std::shared_ptr<const Member>& to, const std::vector<Copy>& copies,
                        const absl::StatusOr<std::vector<TakeOutcome>>& reply) {
  const storage::TenantId tenant = copies.front().offering.pool.tenant;
  if (busy_until_.size() > kMostPaused) busy_until_.clear();
  TakeOutcome of_all = TakeOutcome::kFailed;
  if (!reply.ok()) {
    const CallFailure failure = WhatFailed(reply.status());
    if (failure == CallFailure::kBusy) of_all = TakeOutcome::kBusy;
    if (failure == CallFailure::kTenant) Pause(*to, tenant, options_.pause);
    if (failure == CallFailure::kNode) Pause(*to, storage::kNoTenant, options_.pause);
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    const TakeOutcome outcome = reply.ok() ? (*reply)[i] : of_all;
    if (outcome == TakeOutcome::kNoSpace) Pause(*to, tenant, options_.pause);
    if (outcome == TakeOutcome::kBusy) busy_until_[to->incarnation] = clock_.Now() + options_.busy_pause;
    const auto demand = demand_.find(PlaceOf(copies[i].offering));
    if (demand == demand_.end()) continue;
    // A node that did not open the offered object does not want it: stop counting it as a requester.
    const auto asker = demand->second.askers.find(to->node);
    const bool opened = asker == demand->second.askers.end() || asker->second != copies[i].marked_at;
    const bool has_it = outcome == TakeOutcome::kAccepted || outcome == TakeOutcome::kAlreadyPresent;
    if (!opened && !has_it && outcome != TakeOutcome::kTimedOut) demand->second.askers.erase(asker);
    const bool again = outcome == TakeOutcome::kBusy && !demand->second.waits && waiting_.size() < options_.waiting;
    if (again) Wait(demand->first);
  }
}

}  // namespace ashlar::daemon
