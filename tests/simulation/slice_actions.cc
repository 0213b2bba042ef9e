// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/slice_actions.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ashlar::simulation {

void SliceActions::Lookup() {
  const SessionId session = *Any(clients_.sessions);
  Searching& next = clients_.searches.emplace_back();
  next.lease.session = session;
  next.begun = next.needed_at = world_.clock.Now();
  next.begun_at_step = report_.step;
  next.drains = history_.drains;
  if (features_.prompts && Draw(2) == 0) next.lease.asked = prompts_.AnyPrompt(session);
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
  GoOnSearching(std::prev(clients_.searches.end()));
}

void SliceActions::GoOnSearching(std::list<Searching>::iterator searching) {
  if (*searching->waits) return;
  storage::Slice slice = AnySlice([waits = searching->waits] { *waits = false; });
  if (!searching->search->Run(slice)) {
    *searching->waits = slice.waits();
    return;
  }
  Searched(*searching, searching->search->Take());
  clients_.searches.erase(searching);
}

void SliceActions::Searched(Searching& searching, Match match) {
  const bool sliced = searching.begun_at_step != report_.step;
  // The hits of a lookup that fails still count as used.
  for (const Text& text : searching.texts) {
    if (!sliced) break;
    for (const Text& part : BundleOf(text)) history_.used[part] = world_.clock.Now();
  }
  Lease lease = std::move(searching.lease);
  if (std::ranges::count(clients_.sessions, lease.session) == 0) {
    const auto refused = [](const Found& found) { return found.reason == MissReason::kInvalidRequest; };
    if (match.lease != LeaseId{} || !std::ranges::all_of(match.found, refused))
      Fail("found for a session that is gone");
    clients_.ticks = clients_.ticked_in_parts = true;  // the next tick releases what it held
    return;
  }
  if (lease.asked) prompts_.Check(lease, match, searching.queries.size());
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
      oracle_.CheckHit(text, found, searching.begun);
      oracle_.CheckNotErased(text, searching.begun_at_step);
      lease.texts.push_back(text);
    } else if (found.reason == MissReason::kCovered) {
      if (match.prefix.depth <= begin) Fail("covered by no prefix");
    } else if (found.reason != MissReason::kDaemonUnavailable && !changed) {
      oracle_.CheckMiss(text, found.reason, searching.queries[i].recompute);
    }
    begin += searching.queries[i].tokens;
  }
  if (lease.id == LeaseId{}) return;
  if (match.prefix.depth == 0) {
    lease.asked.reset();
  } else {
    lease.asked->match = std::move(match);
  }
  clients_.leases.push_back(std::move(lease));
  if (clients_.leases.back().asked && Draw(2) == 0) prompts_.Land(clients_.leases.back());
}

void SliceActions::Release() {
  if (clients_.leases.empty()) return;
  const auto lease = Any(clients_.leases);
  const SessionId session = lease->session;
  cache().EndLease(session, lease->id);
  clients_.leases.erase(lease);
  storage::Slice slice = AnySlice();
  if (!cache().SettleLeases(session, slice)) clients_.releasing.push_back(session);
}

void SliceActions::Close(SessionId session, const std::function<void()>& drained) {
  storage::Slice slice = AnySlice();
  if (!cache().CloseSession(session, drained, slice)) clients_.closing.push_back({session, drained});
}

void SliceActions::Tick() {
  if (world_.bug == Bug::kDropsDeadlines) {
    clients_.ticks = false;
  } else {
    storage::Slice slice = AnySlice();
    clients_.ticks = !cache().Tick(slice);
    clients_.ticked_in_parts |= clients_.ticks;
  }
  if (clients_.ticks) return NoteEnded();
  oracle_.CheckDeadlines();
  if (!std::exchange(clients_.ticked_in_parts, false)) oracle_.CheckExpired();
}

// One of the calls in progress.
void SliceActions::GoOn() {
  if (world_.bug == Bug::kDropsSlices) return;
  if (clients_.ticks && Draw(2) == 0) return Tick();
  if (!clients_.searches.empty() && Draw(2) == 0) return GoOnSearching(Any(clients_.searches));
  storage::Slice slice = AnySlice();
  if (!clients_.releasing.empty() && Draw(2) == 0) {
    const auto next = Any(clients_.releasing);
    if (cache().SettleLeases(*next, slice)) clients_.releasing.erase(next);
  } else if (!clients_.closing.empty()) {
    const auto next = Any(clients_.closing);
    if (cache().CloseSession(next->session, next->drained, slice)) clients_.closing.erase(next);
  }
}

// A tick in progress has ended some overdue items.
void SliceActions::NoteEnded() {
  const Nanos now = world_.clock.Now();
  std::erase_if(clients_.leases, [&](const Lease& lease) {
    return lease.deadline && *lease.deadline <= now && !cache().Held(lease.session, lease.id).ok();
  });
  std::erase_if(clients_.reservations, [&](const Reservation& reservation) {
    return !reservation.publishing && oracle_.DeadlineOf(reservation) <= now &&
           cache().Planned(reservation.session, reservation.id) == nullptr;
  });
  std::erase_if(history_.pins, [now](const auto& pin) { return pin.second <= now; });
}

// Continues all calls in progress to their end.
void SliceActions::EndAll() {
  if (world_.bug == Bug::kDropsSlices) return;
  storage::Slice whole;
  for (; !clients_.searches.empty(); clients_.searches.pop_front()) {
    clients_.searches.front().search->Run(whole);
    Searched(clients_.searches.front(), clients_.searches.front().search->Take());
  }
  for (const SessionId session : std::exchange(clients_.releasing, {})) cache().SettleLeases(session, whole);
  for (const Closing& closing : std::exchange(clients_.closing, {}))
    cache().CloseSession(closing.session, closing.drained, whole);
}

}  // namespace ashlar::simulation
