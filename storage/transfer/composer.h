// SPDX-License-Identifier: Apache-2.0
// Composer: the compositions in flight, their references, and their outcomes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/session_transfers.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/composition.h"
#include "storage/transfer/in_flight.h"
#include "storage/transfer/mover.h"
#include "storage/transfer/verified_layers.h"

namespace ashlar::storage {

// A composition holds references of its own: what it reads stays, whatever becomes of the lease.
class Composer {
 public:
  using Done = std::function<void(CompositionVerdict)>;

  // A session has `per_session` in flight at most; of its tenant `in_flight` counts. More are answered kBusy.
  Composer(ObjectTable& table, Mover& mover, SessionTransfers& transfers, const Clock& clock, InFlight& in_flight,
           size_t per_session, Observer& observer);

  // `found` is what the lease holds, in the match's order, and `verified` what is known of it; without a lease:
  // nothing.
  void Compose(SessionId session, TenantId tenant, LandingId id, std::span<const ObjectTable::Result> found,
               const VerifiedLayers& verified, Composition composition, Done done);
  // Cancels; `quiet` comes behind the verdict, or at once for an unknown composition.
  void Quiesce(SessionId session, LandingId id, std::function<void()> quiet);
  void CloseSession(SessionId session);  // cancels all of it

  size_t compositions() const { return compositions_.size(); }

 private:
  struct Call {
    TenantId tenant = 0;
    Nanos begin = 0;
    std::vector<ObjectTable::Reference> objects;  // one an interior; empty where there is none
    CompositionVerdict verdict;
    std::vector<ComposeSource> sources;
    Composition composition;
    bool started = false;
    CancelFlag cancel;
    Done done;
    std::vector<std::function<void()>> quiet;
    uint64_t held_bytes = 0;  // by what the request names
  };
  using Name = std::pair<SessionId, LandingId>;

  // References what the interiors name and says what is missing.
  static void Collect(Call& call, std::span<const ObjectTable::Result> found, const Composition& composition);
  size_t CountOf(SessionId session) const;
  // Starts once all interiors are there: their copies may still be on their way up.
  void Continue(const Name& name);
  void Start(const Name& name, Call& call);
  void Cancel(const Name& name, Call& call);
  void End(const Name& name);
  void Finish(const Name& name, const std::vector<bool>& corrupt, MissReason outcome);
  void Conclude(Call call);

  ObjectTable& table_;
  Mover& mover_;
  SessionTransfers& transfers_;
  const Clock& clock_;
  InFlight& in_flight_;
  const size_t per_session_;
  Observer& observer_;
  std::map<Name, Call> compositions_;
};

}  // namespace ashlar::storage
