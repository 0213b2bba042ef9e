// SPDX-License-Identifier: Apache-2.0
// Publisher: publishing in two phases, reserve and then copy in. Nobody finds an object before its bytes are whole and
// hashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "absl/container/btree_set.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/session_transfers.h"
#include "storage/slice.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/mover.h"
#include "storage/transfer/rates.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

// Holds the reservations of all sessions. A reservation ends published, or abandoned: by its engine, by the end of its
// session, or, while no publish of it is in flight, by its deadline. An engine reserves several objects and computes
// them one after the other, so each publish of a session renews the deadlines of its other reservations, up to
// kMostRenewals times the reservation time: an engine that erased one keeps others from publishing it no longer.
// The objects of a prefix's commit, which the cache itself reserves and publishes, renew nothing.
class Publisher {
 public:
  // `level_of`: where a session's engine publishes to.
  using LevelOf = std::function<size_t(SessionId)>;
  Publisher(ObjectTable& table, Mover& mover, const Clock& clock, SessionTransfers& transfers, Rates& byte_rates,
            Nanos reservation_time, LevelOf level_of);

  struct Reserved {
    ReserveOutcome outcome = ReserveOutcome::kUnavailable;
    ReservationId id = 0;
  };
  Reserved Reserve(SessionId session, const TenantPool& pool, const ObjectHeader& plan, Nanos recompute, double flops);
  const ObjectHeader* Planned(SessionId session, ReservationId id) const;
  // `done` once, possibly before this returns. Every outcome but kBusy ends the reservation; kBusy: no thread is free,
  // or the tenant has had its bytes for now. `renews`: the session's other reservations.
  void Publish(SessionId session, ReservationId id, PublishSource source, bool renews,
               std::function<void(PublishOutcome)> done);
  // Harmless for an unknown reservation; a publish in flight continues.
  void Abandon(SessionId session, ReservationId id);
  // Abandons the session's reservations, a step each, and counts them in `abandoned`; publishes in flight stop and
  // drain. False: there are more, call again.
  bool CloseSession(SessionId session, Slice& slice, size_t& abandoned);
  // Abandons the reservations that are past their deadlines, a step each. False: there are more, call again.
  bool Expire(Slice& slice);

  size_t reservations() const { return reservations_.size(); }

 private:
  static constexpr Nanos kMostRenewals = 10;

  struct Reservation {
    ObjectTable::Reference object;
    TenantId tenant;
    Nanos reserved_at;
    Nanos deadline;
    std::optional<CancelFlag> publish;  // set while one is in flight
    bool renews = true;                 // the publish in flight
  };
  using Name = std::pair<SessionId, ReservationId>;
  using Reservations = std::map<Name, Reservation>;

  void End(Reservations::iterator reservation);  // of which no publish is in flight
  void Progressed(SessionId session);
  // Returns the deadline that the session's progress gives a reservation.
  Nanos Renewed(SessionId session, const Reservation& reservation) const;
  void Finish(const Name& name, std::optional<ObjectHeader> header, Nanos source_deadline,
              const std::function<void(PublishOutcome)>& done);

  ObjectTable& table_;
  Mover& mover_;
  const Clock& clock_;
  SessionTransfers& transfers_;
  Rates& byte_rates_;
  const Nanos reservation_time_;
  const LevelOf level_of_;
  ReservationId next_id_ = 1;
  Reservations reservations_;
  absl::btree_set<std::pair<Nanos, Name>> deadlines_;  // of those of which no publish is in flight
  std::map<SessionId, Nanos> progress_;                // the last publish of sessions that have published
};

}  // namespace ashlar::storage
