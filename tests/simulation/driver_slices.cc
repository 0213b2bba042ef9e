// SPDX-License-Identifier: Apache-2.0
// Calls in slices: any other step may happen between two of them.
#include <iterator>

#include "tests/simulation/driver.h"

namespace ashlar::simulation {

// All of it, or a few steps.
storage::Slice Driver::AnySlice() {
  return features_.slices && Draw(2) == 0 ? storage::Slice(1 + Draw(4)) : storage::Slice();
}

void Driver::Lookup() {
  const SessionId session = AnySession();
  Searching& next = searches_.emplace_back();
  next.lease.session = session;
  next.begun = next.needed_at = world_.clock.Now();
  next.begun_at_step = report_.step;
  next.drains = drains_;
  if (features_.prompts && Draw(2) == 0) next.lease.asked = AnyPrompt(session);
  for (uint64_t n = (next.lease.asked ? 0 : 1) + Draw(3); n > 0; --n) {
    next.texts.push_back(AnyText(TenantOf(session)));
    const ObjectHeader& plan = Plans().at(next.texts.back());
    next.queries.push_back({.kind = plan.kind,
                            .key = plan.key,
                            .shard = plan.shard,
                            .tokens = plan.tokens,
                            .recompute = AnyRecompute(),
                            .needed_at = AnyNeed()});
    next.needed_at = std::max(next.needed_at, next.queries.back().needed_at);
  }
  if (next.lease.asked) {
    const Asked& asked = *next.lease.asked;
    next.prompt.emplace(Prompts::Of(TenantOf(session)).Ask(asked.tokens, asked.conversation, Rebuilds(session)));
    next.prompt->needed_at = AnyNeed();
    next.needed_at = std::max(next.needed_at, next.prompt->needed_at);
  }
  next.search = cache().StartLookup(session, next.queries, next.prompt ? &*next.prompt : nullptr, nullptr);
  GoOnSearching(std::prev(searches_.end()));
}

void Driver::GoOnSearching(std::list<Searching>::iterator searching) {
  storage::Slice slice = AnySlice();
  if (!searching->search->Run(slice)) return;
  Searched(*searching, searching->search->Take());
  searches_.erase(searching);
}

void Driver::Searched(Searching& searching, Match match) {
  const bool sliced = searching.begun_at_step != report_.step;
  // The hits of a lookup that fails still count as used.
  for (const Text& text : searching.texts) {
    if (!sliced) break;
    for (const Text& part : BundleOf(text)) used_[part] = world_.clock.Now();
  }
  Lease lease = std::move(searching.lease);
  if (std::ranges::count(sessions_, lease.session) == 0) {
    const auto refused = [](const Found& found) { return found.reason == MissReason::kInvalidRequest; };
    if (match.lease != LeaseId{} || !std::ranges::all_of(match.found, refused))
      Fail("found for a session that is gone");
    ticks_ = ticked_in_parts_ = true;  // the next tick releases what it held
    return;
  }
  if (lease.asked) CheckPrefix(lease, match, searching.queries.size());
  if (match.prefix.depth > 0 && searching.drains) Fail("a cache that drains resumes a prompt");
  lease.id = match.lease;
  lease.deadline = searching.needed_at + kDeadline;
  uint64_t begin = 0;
  for (size_t i = 0; i < searching.queries.size(); ++i) {
    const Found& found = match.found[i];
    const Text& text = searching.texts[i];
    Trace(static_cast<uint64_t>(found.reason));
    if (searching.drains != (found.reason == MissReason::kDaemonUnavailable)) {
      Fail("a cache that drains is found things in, or another is unavailable");
    }
    // A miss some slices ago may have changed since.
    const bool changed = sliced && (found.reason == MissReason::kEvicted || found.reason == MissReason::kExpired);
    if (found.reason == MissReason::kNone) {
      CheckHit(text, found, searching.begun);
      CheckNotErased(text, searching.begun_at_step);
      lease.texts.push_back(text);
    } else if (found.reason == MissReason::kCovered) {
      if (match.prefix.depth <= begin) Fail("covered by no prefix");
    } else if (found.reason != MissReason::kDaemonUnavailable && !changed) {
      CheckMiss(text, found.reason, searching.queries[i].recompute);
    }
    begin += searching.queries[i].tokens;
  }
  if (lease.id == LeaseId{}) return;
  if (match.prefix.depth == 0) {
    lease.asked.reset();
  } else {
    lease.asked->match = std::move(match);
  }
  leases_.push_back(std::move(lease));
  if (leases_.back().asked && Draw(2) == 0) LandPrefix(leases_.back());
}

void Driver::Release() {
  if (leases_.empty()) return;
  const auto lease = Any(leases_);
  const SessionId session = lease->session;
  cache().EndLease(session, lease->id);
  leases_.erase(lease);
  storage::Slice slice = AnySlice();
  if (!cache().SettleLeases(session, slice)) releasing_.push_back(session);
}

void Driver::Close(SessionId session, const std::function<void()>& drained) {
  storage::Slice slice = AnySlice();
  if (!cache().CloseSession(session, drained, slice)) closing_.push_back({session, drained});
}

void Driver::Tick() {
  if (world_.bug == Bug::kDropsDeadlines) {
    ticks_ = false;
  } else {
    storage::Slice slice = AnySlice();
    ticks_ = !cache().Tick(slice);
    ticked_in_parts_ |= ticks_;
  }
  if (ticks_) return NoteEnded();
  CheckDeadlines();
  if (!std::exchange(ticked_in_parts_, false)) CheckExpired();
}

// One of the calls in progress.
void Driver::GoOn() {
  if (world_.bug == Bug::kDropsSlices) return;
  if (ticks_ && Draw(2) == 0) return Tick();
  if (!searches_.empty() && Draw(2) == 0) return GoOnSearching(Any(searches_));
  storage::Slice slice = AnySlice();
  if (!releasing_.empty() && Draw(2) == 0) {
    const auto next = Any(releasing_);
    if (cache().SettleLeases(*next, slice)) releasing_.erase(next);
  } else if (!closing_.empty()) {
    const auto next = Any(closing_);
    if (cache().CloseSession(next->session, next->drained, slice)) closing_.erase(next);
  }
}

// A tick in progress has ended some overdue items.
void Driver::NoteEnded() {
  const Nanos now = world_.clock.Now();
  std::erase_if(leases_, [&](const Lease& lease) {
    return lease.deadline && *lease.deadline <= now && !cache().Held(lease.session, lease.id).ok();
  });
  std::erase_if(reservations_, [&](const Reservation& reservation) {
    return !reservation.publishing && DeadlineOf(reservation) <= now &&
           cache().Planned(reservation.session, reservation.id) == nullptr;
  });
  std::erase_if(pins_, [now](const auto& pin) { return pin.second <= now; });
}

// Returns whether something that has ended may still hold space.
bool Driver::SomethingEnds() const {
  return ticks_ || !searches_.empty() || !releasing_.empty() || !closing_.empty();
}

// Continues all calls in progress to their end.
void Driver::EndSlices() {
  if (world_.bug == Bug::kDropsSlices) return;
  storage::Slice whole;
  for (; !searches_.empty(); searches_.pop_front()) {
    searches_.front().search->Run(whole);
    Searched(searches_.front(), searches_.front().search->Take());
  }
  for (const SessionId session : std::exchange(releasing_, {})) cache().SettleLeases(session, whole);
  for (const Closing& closing : std::exchange(closing_, {}))
    cache().CloseSession(closing.session, closing.drained, whole);
}

// As if the daemon is killed.
void Driver::DropSlices() {
  searches_.clear();
  releasing_.clear();
  closing_.clear();
  ticks_ = ticked_in_parts_ = false;
}

}  // namespace ashlar::simulation
