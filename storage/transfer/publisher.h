// SPDX-License-Identifier: Apache-2.0
// Publisher: two-phase publishing: reserve, then copy. No lookup finds an object before its bytes are complete and
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
#include "storage/objects/object_reference.h"
#include "storage/objects/object_writer.h"
#include "storage/session_transfers.h"
#include "storage/slice.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/mover.h"
#include "storage/transfer/rates.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

// Holds the reservations of all sessions. A reservation ends when it is published or abandoned: by its engine, by the
// end of its session, or by its deadline unless a publish is in flight. An engine reserves several objects and computes
// them one after the other, so each publish renews the deadlines of the session's other reservations, at most
// kMostRenewals times, so that a reservation that the engine has lost does not block other publishers for longer. The
// objects of a prefix commit, which the cache reserves and publishes itself, renew nothing.
class Publisher {
 public:
  // `level_of` returns the level that a session's engine publishes to.
  using LevelOf = std::function<size_t(SessionId)>;
  Publisher(ObjectWriter& writer, Mover& mover, const Clock& clock, SessionTransfers& transfers, Rates& byte_rates,
            Nanos reservation_time, LevelOf level_of);

  struct Reserved {
    ReserveOutcome outcome = ReserveOutcome::kUnavailable;
    ReservationId id = 0;
  };
  Reserved Reserve(SessionId session, const TenantPool& pool, const ObjectHeader& plan, Nanos recompute, double flops);
  // Tier::WhenGrown of the level that the session publishes to. Call before Reserve.
  bool WhenGrown(SessionId session, TenantId tenant, uint64_t extents, std::function<void(bool grown)> call) {
    return writer_.WhenGrown(tenant, level_of_(session), extents, std::move(call));
  }
  const ObjectHeader* Planned(SessionId session, ReservationId id) const;
  // `done` is called once, possibly before this returns. kBusy (no thread is free, or the tenant exceeded its byte
  // rate) keeps the reservation; every other outcome ends it. `renews`: renews the session's other reservations.
  void Publish(SessionId session, ReservationId id, PublishSource source, bool renews,
               std::function<void(PublishOutcome)> done);
  // Unknown reservations are ignored; a publish in flight continues.
  void Abandon(SessionId session, ReservationId id);
  // Abandons the session's reservations, one per step, and counts them in `abandoned`; publishes in flight are
  // cancelled and drain. Returns false if more are left.
  bool CloseSession(SessionId session, Slice& slice, size_t& abandoned);
  // Abandons reservations past their deadlines, one per step. Returns false if more are left.
  bool Expire(Slice& slice);

  size_t reservations() const { return reservations_.size(); }

 private:
  static constexpr Nanos kMostRenewals = 10;

  struct Reservation {
    ObjectReference object;
    TenantId tenant;
    Nanos reserved_at;
    Nanos deadline;
    std::optional<CancelFlag> publish;  // set while one is in flight
    bool renews = true;                 // set by the publish in flight
  };
  using Name = std::pair<SessionId, ReservationId>;
  using Reservations = std::map<Name, Reservation>;

  void End(Reservations::iterator reservation);  // no publish of it may be in flight
  void Progressed(SessionId session);
  // Returns the deadline of a reservation, renewed by the session's latest publish.
  Nanos Renewed(SessionId session, const Reservation& reservation) const;
  void Finish(const Name& name, std::optional<ObjectHeader> header, Nanos source_deadline,
              const std::function<void(PublishOutcome)>& done);

  ObjectWriter& writer_;
  Mover& mover_;
  const Clock& clock_;
  SessionTransfers& transfers_;
  Rates& byte_rates_;
  const Nanos reservation_time_;
  const LevelOf level_of_;
  ReservationId next_id_ = 1;
  Reservations reservations_;
  absl::btree_set<std::pair<Nanos, Name>> deadlines_;  // reservations without a publish in flight
  std::map<SessionId, Nanos> progress_;                // the latest publish per session
};

}  // namespace ashlar::storage
