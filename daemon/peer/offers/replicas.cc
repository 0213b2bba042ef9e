#include "daemon/peer/offers/replicas.h"

#include <algorithm>
#include <optional>
#include <set>
#include <span>

namespace ashlar::daemon {

void Replicas::Asked(const std::string& node, storage::TenantId tenant, const Key& key) {
  if (options_.bytes_per_second == 0) return;
  const storage::Nanos now = clock_.Now();
  if (demand_.size() >= options_.objects && !demand_.contains({tenant, key})) Forget(now);
  if (demand_.size() >= options_.objects && !demand_.contains({tenant, key})) return;
  Demand& demand = demand_[{tenant, key}];
  std::erase_if(demand.askers, [&](const auto& asker) { return now - asker.second > options_.window; });
  if (demand.askers.size() >= kMostAskers && !demand.askers.contains(node)) return;
  const bool first = !demand.askers.contains(node);
  demand.askers[node] = demand.asked_at = now;
  if (!first || demand.waits || demand.askers.size() < options_.askers || waiting_.size() >= options_.waiting) return;
  demand.waits = true;
  waiting_.emplace_back(tenant, key);
}

// At most once a second: it looks at all.
void Replicas::Forget(storage::Nanos now) {
  if (now - forgot_at_ < 1'000'000'000) return;
  forgot_at_ = now;
  std::erase_if(demand_,
                [&](const auto& one) { return !one.second.waits && now - one.second.asked_at > options_.window; });
}

// In turn, of those that neither have it nor asked for it, and had room lately.
std::shared_ptr<const Member> Replicas::NodeFor(const storage::Offering& offering, const Demand& demand) {
  std::vector<std::shared_ptr<const Member>> members = directory_.Members();
  if (members.size() < 2) return nullptr;
  std::set<uint64_t> holders;
  for (const Located& located : directory_.Locate(offering.ns, std::span(&offering.key, 1))) {
    holders.insert(located.member->incarnation);
  }
  const storage::Nanos now = clock_.Now();
  for (size_t i = 1; i < members.size(); ++i) {  // this node is the first
    const std::shared_ptr<const Member>& member = members[1 + (turn_ + i) % (members.size() - 1)];
    const auto pause = not_before_.find(member->incarnation);
    const bool paused = pause != not_before_.end() && pause->second > now;
    if (paused || holders.contains(member->incarnation) || demand.askers.contains(member->node)) continue;
    ++turn_;
    return member;
  }
  return nullptr;
}

void Replicas::Tick() {
  const storage::Nanos now = clock_.Now();
  const auto rate = static_cast<double>(options_.bytes_per_second);
  if (allowed_at_ > 0) allowance_ += rate * static_cast<double>(now - allowed_at_) / 1e9;
  allowance_ = std::min(allowance_, rate);  // of a second
  allowed_at_ = now;
  while (!waiting_.empty() && allowance_ > 0) {
    const auto [tenant, key] = waiting_.front();
    waiting_.pop_front();
    Demand& demand = demand_[{tenant, key}];
    demand.waits = false;
    const std::optional<storage::Offering> offering = cache_.offers().Describe(tenant, key);
    if (!offering || cache_.draining()) continue;
    const std::shared_ptr<const Member> to = NodeFor(*offering, demand);
    if (to == nullptr) continue;
    allowance_ -= static_cast<double>(offering->bytes * offering->shards);
    offerer_.Offer(to, {*offering}, OfferKind::kHot, options_.patience_ms,
                   [this, to](const absl::StatusOr<std::vector<TakeOutcome>>& reply) {
                     if (reply.ok() && reply->front() != TakeOutcome::kNoRoom) return;
                     if (not_before_.size() > 4096) not_before_.clear();
                     not_before_[to->incarnation] = clock_.Now() + options_.pause;
                   });
  }
}

}  // namespace ashlar::daemon
