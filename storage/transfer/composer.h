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
#include "storage/objects/object_reference.h"
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

// A composition holds its own references: what it reads stays, even if the lease ends.
class Composer {
 public:
  using Done = std::function<void(CompositionVerdict)>;

  // A session may have `per_session` in flight; `in_flight` limits its tenant. More are answered kBusy.
  Composer(ObjectTable& table, Mover& mover, SessionTransfers& transfers, const Clock& clock, InFlight& in_flight,
           size_t per_session, Observer& observer);

  // `found` are the objects of the lease in the order of the match, and `verified` its verified layers; empty without a
  // lease.
  void Compose(SessionId session, TenantId tenant, LandingId id, std::span<const FoundObject> found,
               const VerifiedLayers& verified, Composition composition, Done done);
  // Cancels; `quiesced` is called after the verdict, or immediately for an unknown composition.
  void Quiesce(SessionId session, LandingId id, std::function<void()> quiesced);
  void CloseSession(SessionId session);  // cancels all of it

  size_t compositions() const { return compositions_.size(); }

 private:
  struct Call {
    TenantId tenant = 0;
    Nanos begin = 0;
    std::vector<ObjectReference> objects;  // one per interior; empty for missing ones
    CompositionVerdict verdict;
    std::vector<ComposeSource> sources;
    Composition composition;
    bool started = false;
    CancelFlag cancel;
    Done done;
    std::vector<std::function<void()>> quiesced;
    uint64_t held_bytes = 0;  // held by the request
  };
  using Name = std::pair<SessionId, LandingId>;

  // References the objects of the interiors, and determines what is missing.
  static void Collect(Call& call, std::span<const FoundObject> found, const Composition& composition);
  size_t CountOf(SessionId session) const;
  // Starts when all interiors are loaded; their copies may still be in flight.
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
