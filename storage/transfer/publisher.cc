// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/publisher.h"

#include <algorithm>
#include <utility>

namespace ashlar::storage {

Publisher::Publisher(ObjectWriter& writer, Mover& mover, const Clock& clock, SessionTransfers& transfers,
                     Rates& byte_rates, Nanos reservation_time, LevelOf level_of)
    : writer_(writer),
      mover_(mover),
      clock_(clock),
      transfers_(transfers),
      byte_rates_(byte_rates),
      reservation_time_(reservation_time),
      level_of_(std::move(level_of)) {}

Publisher::Reserved Publisher::Reserve(SessionId session, const TenantPool& pool, const ObjectHeader& plan,
                                       Nanos recompute, double flops) {
  ObjectWriter::Reserved reserved = writer_.Reserve(pool, plan, recompute, flops, level_of_(session));
  if (reserved.outcome != ReserveOutcome::kGranted) return {reserved.outcome, 0};
  const ReservationId id = next_id_++;
  const Nanos now = clock_.Now(), deadline = now + reservation_time_;
  reservations_.emplace(
      Name(session, id),
      Reservation{
          .object = std::move(reserved.object), .tenant = pool.tenant, .reserved_at = now, .deadline = deadline});
  deadlines_.emplace(deadline, Name(session, id));
  return {ReserveOutcome::kGranted, id};
}

void Publisher::End(Reservations::iterator reservation) {
  deadlines_.erase({reservation->second.deadline, reservation->first});
  reservations_.erase(reservation);
}

void Publisher::Progressed(SessionId session) {
  progress_[session] = clock_.Now();
}

Nanos Publisher::Renewed(SessionId session, const Reservation& reservation) const {
  const auto progress = progress_.find(session);
  if (progress == progress_.end()) return reservation.deadline;
  const Nanos most = reservation.reserved_at + kMostRenewals * reservation_time_;
  return std::max(reservation.deadline, std::min(progress->second + reservation_time_, most));
}

const ObjectHeader* Publisher::Planned(SessionId session, ReservationId id) const {
  const auto found = reservations_.find({session, id});
  return found == reservations_.end() ? nullptr : &found->second.object->header;
}

void Publisher::Publish(SessionId session, ReservationId id, PublishSource source, bool renews,
                        std::function<void(PublishOutcome)> done) {
  const Name name(session, id);
  const auto found = reservations_.find(name);
  if (found == reservations_.end() || found->second.publish) return done(PublishOutcome::kUnknownReservation);
  if (renews) Progressed(session);
  Reservation& reservation = found->second;
  reservation.renews = renews;
  const ObjectReference& object = reservation.object;
  const ObjectHeader plan = source.plan.value_or(object->header);
  const Slot& slot = object.copy().slot;
  const kernels::Gpu* const gpu = object.tier().gpu();
  const bool reached = gpu == nullptr || LiesOn(source, *gpu);
  if (plan.key != object->header.key || plan.Extents() > slot.Extents() || !reached || !Fits(source, plan)) {
    End(found);
    return done(PublishOutcome::kBadSource);
  }
  if (!byte_rates_.Take(reservation.tenant, plan.bytes)) return done(PublishOutcome::kBusy);
  const CancelFlag cancel;
  const Nanos source_deadline = source.deadline;
  reservation.publish = cancel;
  deadlines_.erase({reservation.deadline, name});
  transfers_.Begin(session);
  const bool started = mover_.Publish(
      plan, slot, std::move(source), cancel,
      [this, name, source_deadline, done](std::optional<ObjectHeader> header) {
        Finish(name, std::move(header), source_deadline, done);
      },
      &object.tier());
  if (started) return;  // an executor that runs immediately may have ended the reservation
  reservation.publish.reset();
  deadlines_.emplace(reservation.deadline, name);
  done(PublishOutcome::kBusy);
  transfers_.End(session);
}

void Publisher::Finish(const Name& name, std::optional<ObjectHeader> header, Nanos source_deadline,
                       const std::function<void(PublishOutcome)>& done) {
  // A copy that ended after the engine reused its memory may hold torn bytes.
  const bool torn = source_deadline != 0 && clock_.Now() > source_deadline;
  const bool whole = header.has_value() && !torn;
  {
    const auto ended = reservations_.extract(name);
    if (ended.mapped().renews && progress_.contains(name.first))
      Progressed(name.first);  // not for a session that has ended
    if (whole) writer_.Publish(ended.mapped().object, *std::move(header));
  }  // drops the reference: the object is now idle or abandoned
  done(whole ? PublishOutcome::kPublished : PublishOutcome::kUnavailable);
  transfers_.End(name.first);
}

void Publisher::Abandon(SessionId session, ReservationId id) {
  const auto found = reservations_.find({session, id});
  if (found != reservations_.end() && !found->second.publish) End(found);
}

bool Publisher::CloseSession(SessionId session, Slice& slice, size_t& abandoned) {
  auto next = reservations_.lower_bound({session, 0});
  while (next != reservations_.end() && next->first.first == session) {
    const auto current = next++;
    if (current->second.publish) {
      current->second.publish->Cancel();
      continue;
    }
    if (!slice.Take()) return false;
    End(current);
    ++abandoned;
  }
  progress_.erase(session);
  return true;
}

bool Publisher::Expire(Slice& slice) {
  const Nanos now = clock_.Now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    if (!slice.Take()) return false;
    const auto next = reservations_.find(deadlines_.begin()->second);
    const Nanos renewed = Renewed(next->first.first, next->second);
    if (renewed <= now) {
      End(next);
      continue;
    }
    deadlines_.erase(deadlines_.begin());
    next->second.deadline = renewed;
    deadlines_.emplace(renewed, next->first);
  }
  return true;
}

}  // namespace ashlar::storage
