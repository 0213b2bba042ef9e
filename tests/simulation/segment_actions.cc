// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/segment_actions.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace ashlar::simulation {
namespace {

constexpr uint64_t kPosition = 5;  // position at which segments are landed

}  // namespace

void SegmentActions::Reserve() {
  const SessionId session = *Any(clients_.sessions);
  const Text text = AnyText(TenantOf(session));
  const ObjectHeader& plan = Plans().at(text);
  const auto pool = Draw(4) == 0 ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic;
  const Nanos recompute = AnyRecompute();
  const Cache::Reservation reservation = cache().Reserve(session, plan, {}, pool, recompute);
  Trace(static_cast<uint64_t>(reservation.outcome));
  if (reservation.outcome == ReserveOutcome::kGranted) {
    clients_.reservations.push_back({session, reservation.id, text, world_.clock.Now()});
  }
  if (reservation.outcome == ReserveOutcome::kAlreadyPresent) oracle_.CheckUse(text, std::nullopt);
  if (reservation.outcome == ReserveOutcome::kNoSpace) oracle_.CheckSpace(text.first, plan.Extents());
  if ((reservation.outcome == ReserveOutcome::kUnavailable) != history_.drains)
    Fail("a cache that drains reserves, or another not");
  if (reservation.outcome == ReserveOutcome::kDeclined) {
    if (recompute == 0) Fail("a reservation was declined without a compute time");
    for (const Text& part : BundleOf(text)) history_.declined.insert(part);
  }
}

void SegmentActions::Publish() {
  if (clients_.reservations.empty()) return;
  Reservation& reservation = *Any(clients_.reservations);
  if (reservation.publishing) return;
  reservation.publishing = true;
  const SessionId session = reservation.session;
  const storage::ReservationId id = reservation.id;
  clients_.progress[session] = world_.clock.Now();
  cache().Publish(session, id, SourceOf(reservation.text, publishes_++),
                  [this, session, id](PublishOutcome outcome) { Published(session, id, outcome); });
}

void SegmentActions::Published(SessionId session, storage::ReservationId id, PublishOutcome outcome) {
  Trace(static_cast<uint64_t>(outcome));
  const auto found = std::ranges::find_if(clients_.reservations, [&](const Reservation& reservation) {
    return reservation.session == session && reservation.id == id;
  });
  if (found == clients_.reservations.end()) return Fail("a publish was answered twice, or was never asked for");
  if (outcome == PublishOutcome::kPublished) {
    history_.published.insert(found->text);
    history_.republished.insert(found->text);
    history_.erased.erase(found->text);
    history_.used[found->text] = history_.surely_used[found->text] = world_.clock.Now();
  }
  const bool copied = outcome == PublishOutcome::kPublished || outcome == PublishOutcome::kUnavailable;
  if (copied && clients_.progress.contains(session)) clients_.progress[session] = world_.clock.Now();
  if (outcome == PublishOutcome::kBusy) {
    found->publishing = false;
  } else {
    clients_.reservations.erase(found);
  }
}

void SegmentActions::Abandon() {
  if (clients_.reservations.empty()) return;
  const auto reservation = Any(clients_.reservations);
  if (reservation->publishing) return;
  cache().Abandon(reservation->session, reservation->id);
  clients_.reservations.erase(reservation);
}

// Another process of an engine attaches to what one found, with the same shard or another one.
void SegmentActions::Attach() {
  if (clients_.leases.empty()) return;
  const Lease first = *Any(clients_.leases);
  const SessionId session = *Any(clients_.sessions);
  const TensorShard shard = Plans().at(AnyText(1)).shard;
  const absl::StatusOr<Match> match = cache().Attach(session, first.id, shard);
  if (!match.ok()) {
    if (TenantOf(session) == TenantOf(first.session)) Fail("a lease is gone that no session ended");
    return;
  }
  if (TenantOf(session) != TenantOf(first.session)) return Fail("attached to another tenant's lease");
  clients_.Use(first.id, false);
  Lease lease{.session = session, .id = match->lease};
  for (const Found& found : match->found) {
    if (found.reason != MissReason::kNone || found.header->kind != ObjectKind::kSegment) continue;
    const auto text = std::ranges::find_if(Plans(), [&](const auto& item) {
      return item.first.first == TenantOf(session) && IsOf(*found.header, item.first);
    });
    if (text == Plans().end() || found.header->shard != shard) return Fail("attached to an object without a lookup");
    oracle_.CheckHit(text->first, found, std::nullopt);
    lease.texts.push_back(text->first);
  }
  // An object that is gone keeps its space as long as any holder of the lease keeps the lease.
  if (match->lease == first.id) {
    lease.texts = first.texts;
    lease.asked = first.asked;
    lease.composed = first.composed;
  } else {
    lease.deadline = world_.clock.Now() + kDeadline;
  }
  const bool held = std::ranges::any_of(
      clients_.leases, [&](const Lease& other) { return other.session == session && other.id == match->lease; });
  if (!held) clients_.leases.push_back(std::move(lease));
}

void SegmentActions::Land(Lease& lease) {
  const Text text = *Any(lease.texts);
  Landing landing{.session = lease.session, .texts = {text}, .lease = lease.id};
  const uint64_t positions = kPosition + Plans().at(text).tokens;
  landing.pages = std::make_unique<TestPages>(TestPages::Holding(positions));
  // The match lists misses, too: find the index of the text.
  const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
  if (!held.ok()) return Fail("a lease is gone that no session ended");
  uint32_t index = 0;
  while (held->found[index].header == nullptr || !IsOf(*held->found[index].header, text)) {
    if (++index == held->found.size()) return;  // dropped since: it is reported as a miss
  }
  clients_.Use(lease.id, true);
  storage::LandTarget target = storage::TestTarget(*landing.pages, {{index, kPosition}});
  landing.ended = [this](const Landing& ended, const std::vector<MissReason>& verdict) { Landed(ended, verdict[0]); };
  landings_.Start(std::move(landing), std::move(target));
}

void SegmentActions::Landed(const Landing& landing, MissReason reason) {
  if (reason == MissReason::kCancelled || reason == MissReason::kBusy) return;
  if (reason != MissReason::kNone) return oracle_.CheckMiss(landing.texts[0], reason);
  if (world_.bug == Bug::kFlipsLandedBits) landing.pages->Key(0, kPosition + 4, 0)[0] += 1;
  const double error =
      storage::LandingError(*landing.pages, Plans().at(landing.texts[0]), ContentOf(landing.texts[0]), kPosition);
  if (!(error < kTolerance)) Fail("bytes landed are not the bytes published");
}

}  // namespace ashlar::simulation
