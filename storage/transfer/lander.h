// SPDX-License-Identifier: Apache-2.0
// Lander: the landings in flight, their objects and references, and the outcome of every segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "proto/outcome.h"
#include "storage/ids.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/session_transfers.h"
#include "storage/transfer/in_flight.h"
#include "storage/transfer/mover.h"
#include "storage/transfer/rates.h"
#include "storage/transfer/transfer.h"
#include "storage/transfer/verified_layers.h"

namespace ashlar::storage {

struct LandCallbacks {
  std::function<void(uint32_t attention_layers_done)> progress;  // the layers have landed in all segments
  std::function<void(std::vector<MissReason> verdict)> done;     // called once; one reason per segment; kNone: landed
};

// A landing holds its own references: what it reads stays, even if the lease ends.
class Lander {
 public:
  // A session has at most `per_session` landings in flight. `in_flight` counts the landings of its tenant, and
  // `byte_rates` their bytes. Landings beyond these bounds are missed with kBusy.
  Lander(ObjectTable& table, Mover& mover, const Clock& clock, SessionTransfers& transfers, InFlight& in_flight,
         Rates& byte_rates, size_t per_session, Observer& observer);
  ~Lander();

  // `found` are the objects of the lease, in the match's order; `verified` records which of its tuples are verified.
  void Land(SessionId session, TenantId tenant, LandingId id, std::span<const FoundObject> found,
            std::shared_ptr<VerifiedLayers> verified, LandTarget target, LandCallbacks callbacks);
  // Cancels. `quiesced` is called after the verdict, or immediately for an unknown landing.
  void Quiesce(SessionId session, LandingId id, std::function<void()> quiesced);
  void CloseSession(SessionId session);  // cancels all landings of it

  size_t landings() const { return landings_.size(); }

 private:
  using Name = std::pair<SessionId, LandingId>;
  class Landing;

  bool MayBegin(SessionId session, const Landing& landing);
  // The mover has ended it.
  void End(const Name& name, MissReason outcome);
  void Conclude(Landing& landing);

  ObjectTable& table_;
  Mover& mover_;
  const Clock& clock_;
  SessionTransfers& transfers_;
  InFlight& in_flight_;
  Rates& byte_rates_;
  const size_t per_session_;
  Observer& observer_;
  std::map<Name, std::unique_ptr<Landing>> landings_;
  std::map<SessionId, size_t> of_session_;  // number of landings; only sessions that have some
};

}  // namespace ashlar::storage
