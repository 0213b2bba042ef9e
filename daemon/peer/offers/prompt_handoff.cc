// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/offers/prompt_handoff.h"

#include <algorithm>
#include <utility>

#include "daemon/peer/channels/call_failure.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kPatienceUnit = 1'000'000;

uint64_t BytesOf(const storage::Offering& offering) {
  return offering.bytes * offering.shards;
}

}  // namespace

void PromptHandoff::Start(storage::TenantId tenant, const storage::PrefixText& text, const std::string& node,
                          uint32_t patience_ms, Done done) {
  if (stopped_ || !MayStart(tenant)) return done({.outcome = HandoffOutcome::kBusy});
  const auto handed = std::make_shared<Text>();
  for (const storage::Query& query : cache_.prefixes().AtEnd(tenant, text)) {
    std::optional<storage::Offering> offering = cache_.offers().Describe(tenant, query.key);
    if (!offering.has_value()) return done({.outcome = HandoffOutcome::kNoStates});
    handed->result.bytes += node == options_.self ? BytesOf(*offering) : 0;
    handed->waiting.push_back(*std::move(offering));
  }
  if (handed->waiting.empty()) return done({.outcome = HandoffOutcome::kNoStates});
  if (node == options_.self) return done(handed->result);
  const std::vector<std::shared_ptr<const Member>> members = directory_.Members();
  const auto member = std::ranges::find(members, node, &Member::node);
  if (member == members.end()) return done({.outcome = HandoffOutcome::kNoNode});
  handed->tenant = tenant;
  handed->to = *member;
  handed->until = clock_.Now() + kPatienceUnit * patience_ms;
  handed->done = std::move(done);
  texts_.push_back(handed);
  GoOn(handed);
}

bool PromptHandoff::MayStart(storage::TenantId tenant) const {
  const auto all = static_cast<size_t>(std::ranges::count_if(texts_, Waits));
  const auto own = static_cast<size_t>(std::ranges::count_if(
      texts_, [tenant](const std::shared_ptr<Text>& text) { return Waits(text) && text->tenant == tenant; }));
  return own + all < options_.most;
}

void PromptHandoff::GoOn(const std::shared_ptr<Text>& text) {
  while (text->done && !text->waiting.empty() && text->offers < options_.offers && offerer_.MayOffer(*text->to)) {
    const storage::Nanos left = text->until - clock_.Now();
    if (left <= 0 || text->not_before > clock_.Now()) return;
    std::vector<storage::Offering> some;
    uint64_t bytes = 0, shards = 0;
    while (!text->waiting.empty()) {
      const storage::Offering& next = text->waiting.front();
      const bool fits =
          shards + next.shards <= limits::kMaxPeerKeysPerCall && bytes + BytesOf(next) <= options_.bytes_of_an_offer;
      if (!some.empty() && !fits) break;
      bytes += BytesOf(next);
      shards += next.shards;
      some.push_back(next);
      text->waiting.pop_front();
    }
    ++text->offers;
    const auto patience =
        static_cast<uint32_t>(std::clamp<storage::Nanos>(left / kPatienceUnit, 1, limits::kMaxPeerPatienceMillis));
    offerer_.Offer(
        text->to, some, OfferKind::kHandoff, patience,
        [this, text, some](const absl::StatusOr<std::vector<TakeOutcome>>& reply) { Answered(text, some, reply); });
  }
}

void PromptHandoff::Answered(const std::shared_ptr<Text>& text, const std::vector<storage::Offering>& some,
                             const absl::StatusOr<std::vector<TakeOutcome>>& reply) {
  --text->offers;
  if (!text->done) return;
  const bool busy = !reply.ok() && WhatFailed(reply.status()) == CallFailure::kBusy;
  if (!reply.ok() && !busy) {
    const bool away = absl::IsUnavailable(reply.status()) || WhatFailed(reply.status()) == CallFailure::kTenant;
    return End(*text, away ? HandoffOutcome::kNoNode : HandoffOutcome::kRefused);
  }
  for (size_t i = 0; i < some.size(); ++i) {
    switch (busy ? TakeOutcome::kBusy : (*reply)[i]) {
      case TakeOutcome::kAccepted:
      case TakeOutcome::kAlreadyPresent:
        text->result.bytes += BytesOf(some[i]);
        break;
      case TakeOutcome::kBusy:
      case TakeOutcome::kTimedOut:  // a repeated request joins it
        text->waiting.push_back(some[i]);
        text->not_before = clock_.Now() + options_.pause;
        break;
      default:
        return End(*text, HandoffOutcome::kRefused);
    }
  }
  if (text->waiting.empty() && text->offers == 0) return End(*text, HandoffOutcome::kCompleted);
  GoOn(text);
}

void PromptHandoff::End(Text& text, HandoffOutcome outcome) {
  text.result.outcome = outcome;
  text.waiting.clear();
  if (const Done done = std::exchange(text.done, nullptr)) done(text.result);
}

void PromptHandoff::Tick() {
  const storage::Nanos now = clock_.Now();
  for (const std::shared_ptr<Text>& text : texts_) {
    if (text->done && text->until <= now) End(*text, HandoffOutcome::kTimedOut);
    GoOn(text);
  }
  std::erase_if(texts_, [](const std::shared_ptr<Text>& text) { return !text->done; });
}

void PromptHandoff::Stop() {
  stopped_ = true;
  for (const std::shared_ptr<Text>& text : texts_) End(*text, HandoffOutcome::kUnavailable);
  texts_.clear();
}

}  // namespace ashlar::daemon
