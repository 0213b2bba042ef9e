// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/offers/offer_taker.h"

#include <algorithm>

namespace ashlar::daemon {
namespace {

storage::Offering OfferingOf(storage::TenantId tenant, const PeerOffered& offered) {
  return {.pool = {tenant, offered.own ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic},
          .ns = offered.ns,
          .key = offered.key,
          .kind = offered.kind,
          .shards = offered.shards,
          .bytes = offered.bytes,
          .uses = offered.uses,
          .idle = offered.idle,
          .saves_a_byte = offered.saves_a_byte,
          .group = offered.group};
}

uint64_t AllBytes(const storage::Offering& offering) {
  return offering.bytes * offering.shards;
}

}  // namespace

void OfferTaker::Offer(const std::string& node, storage::TenantId tenant, const PeerOffer& offer, Answer answer) {
  const auto call = std::make_shared<Call>();
  call->outcomes.resize(offer.objects.size(), TakeOutcome::kTimedOut);
  call->until = clock_.Now() + storage::Nanos{1'000'000} * offer.patience_ms;
  call->answer = std::move(answer);
  call->open = 1 + offer.objects.size();  // one until all are judged
  const std::vector<std::shared_ptr<const Member>> members = directory_.Members();
  const auto member = std::ranges::find(members, node, &Member::node);
  std::vector<Wanted> wanted;
  std::vector<PeerObject> keys;
  for (size_t i = 0; i < offer.objects.size(); ++i) {
    const storage::Offering offering = OfferingOf(tenant, offer.objects[i]);
    TakeOutcome outcome = Judge(offering, offer.kind);
    if (outcome == TakeOutcome::kAccepted && member == members.end()) outcome = TakeOutcome::kFailed;
    const bool busy = stopped_ || calls_.size() >= options_.calls || !MayTake(node, offering);
    if (outcome == TakeOutcome::kAccepted && busy) outcome = TakeOutcome::kBusy;
    if (outcome != TakeOutcome::kAccepted) {
      Settle(call, {offering, i}, outcome);
      continue;
    }
    Begins(node, offering);
    wanted.push_back({offering, i});
    for (uint32_t rank = 0; rank < offering.shards; ++rank) {
      keys.push_back({offering.key, {.rank = rank, .size = offering.shards}});
    }
  }
  if (!wanted.empty()) {
    calls_.push_back(call);
    opener_.Open(tenant, *member, std::move(keys),
                 [this, call, kind = offer.kind, wanted = std::move(wanted)](Opener::Opened opened) {
                   Opened(call, kind, wanted, std::move(opened));
                 });
  }
  if (--call->open == 0) AnswerNow(*call);
}

// An object already in flight costs nothing more.
bool OfferTaker::MayTake(const std::string& node, const storage::Offering& offering) const {
  if (coming_.contains(PlaceOf(offering)) || coming_.empty()) return options_.objects > 0;
  const uint64_t bytes = AllBytes(offering);
  if (coming_.size() >= options_.objects || bytes_ + bytes > options_.bytes) return false;
  const auto share = shares_.find(node);
  if (share == shares_.end()) return true;
  return share->second.objects + 1 + coming_.size() <= options_.objects &&
         share->second.bytes + bytes + bytes_ <= options_.bytes;
}

void OfferTaker::Begins(const std::string& node, const storage::Offering& offering) {
  const auto [at, first] = coming_.try_emplace(PlaceOf(offering), Coming{node, AllBytes(offering)});
  ++at->second.offers;
  if (!first) return;
  Share& share = shares_[node];
  share.bytes += at->second.bytes;
  ++share.objects;
  bytes_ += at->second.bytes;
  stats_.under_way = coming_.size();
}

void OfferTaker::Ends(const storage::Offering& offering) {
  const auto at = coming_.find(PlaceOf(offering));
  if (--at->second.offers > 0) return;
  const auto share = shares_.find(at->second.node);
  share->second.bytes -= at->second.bytes;
  if (--share->second.objects == 0) shares_.erase(share);
  bytes_ -= at->second.bytes;
  coming_.erase(at);
  stats_.under_way = coming_.size();
}

// If an engine waits for it, the top level makes space as for a lookup, if possible.
TakeOutcome OfferTaker::Judge(const storage::Offering& offering, OfferKind kind) {
  const TakeOutcome outcome = cache_.offers().Judge(offering, kind == OfferKind::kDrain);
  const bool waits = kind == OfferKind::kHandoff && outcome == TakeOutcome::kNoSpace;
  return waits ? TakeOutcome::kAccepted : outcome;
}

void OfferTaker::Opened(const std::shared_ptr<Call>& call, OfferKind kind, const std::vector<Wanted>& wanted,
                        Opener::Opened opened) {
  size_t next = 0;
  for (const Wanted& one : wanted) {
    Take(call, kind, one, std::span(opened).subspan(next, one.offering.shards));
    next += one.offering.shards;
  }
}

void OfferTaker::Take(const std::shared_ptr<Call>& call, OfferKind kind, const Wanted& wanted,
                      std::span<absl::StatusOr<OpenedObject>> shards) {
  const storage::Offering& offering = wanted.offering;
  // The offer's description was judged; the headers must agree with it.
  const bool as_offered = std::ranges::all_of(shards, [&](const absl::StatusOr<OpenedObject>& shard) {
    return shard.ok() && shard->header.ns == offering.ns && shard->header.kind == offering.kind &&
           shard->header.bytes <= offering.bytes;
  });
  const TakeOutcome outcome = stopped_      ? TakeOutcome::kBusy
                              : !as_offered ? TakeOutcome::kFailed
                                            : Judge(offering, kind);
  for (absl::StatusOr<OpenedObject>& shard : shards) {
    if (!shard.ok()) continue;
    if (outcome != TakeOutcome::kAccepted) {
      opener_.Close(shard->member, shard->lease);
      continue;
    }
    ObjectHeader header = shard->header;
    const storage::Nanos cost = rates_.Transfer(shard->member->node, header.bytes, clock_.Now());
    const storage::RemoteCopyId copy = objects_.Add(offering.pool.tenant, *std::move(shard), {});
    // Another lookup may have adopted or promoted it: joins that.
    if (!cache_.adoption().AdoptRemote(offering.pool, std::move(header), copy, cost)) objects_.Release(copy);
  }
  if (outcome != TakeOutcome::kAccepted) {
    Ends(offering);
    return Settle(call, wanted, outcome);
  }
  cache_.offers().SetGroup(offering.pool.tenant, offering.key, offering.group);
  cache_.offers().Promote(offering, [this, call, wanted](bool whole) {
    Ends(wanted.offering);
    Settle(call, wanted, whole ? TakeOutcome::kAccepted : TakeOutcome::kFailed);
  });
}

void OfferTaker::Settle(const std::shared_ptr<Call>& call, const Wanted& wanted, TakeOutcome outcome) {
  ++stats_.outcomes[outcome];
  if (outcome == TakeOutcome::kAccepted) stats_.bytes += AllBytes(wanted.offering);
  call->outcomes[wanted.index] = outcome;
  if (--call->open == 0) AnswerNow(*call);
}

void OfferTaker::AnswerNow(Call& call) {
  if (const Answer answer = std::exchange(call.answer, nullptr)) answer(call.outcomes);
}

void OfferTaker::Tick() {
  const storage::Nanos now = clock_.Now();
  for (const std::shared_ptr<Call>& call : calls_) {
    if (call->answer == nullptr || call->until > now) continue;
    stats_.outcomes[TakeOutcome::kTimedOut] += call->open;
    AnswerNow(*call);
  }
  std::erase_if(calls_, [](const std::shared_ptr<Call>& call) { return call->answer == nullptr; });
}

void OfferTaker::Stop() {
  stopped_ = true;
  for (const std::shared_ptr<Call>& call : calls_) AnswerNow(*call);
  calls_.clear();
}

}  // namespace ashlar::daemon
