// SPDX-License-Identifier: Apache-2.0
// Lander: the landings in flight, their objects and references, and the outcome of every segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "proto/outcome.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/session_transfers.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/in_flight.h"
#include "storage/transfer/mover.h"
#include "storage/transfer/rates.h"
#include "storage/transfer/transfer.h"
#include "storage/transfer/verified_layers.h"

namespace ashlar::storage {

struct LandCallbacks {
  std::function<void(uint32_t attention_layers_done)> progress;  // for all segments
  std::function<void(std::vector<MissReason> verdict)> done;     // called once; one entry per segment, kNone: landed
};

// A landing holds its own references: what it reads stays, even if the lease ends.
class Lander {
 public:
  // A session may have `per_session` in flight; `in_flight` and `byte_rates` limit its tenant. More are missed with
  // kBusy.
  Lander(ObjectTable& table, Mover& mover, const Clock& clock, SessionTransfers& transfers, InFlight& in_flight,
         Rates& byte_rates, size_t per_session, Observer& observer);

  // `found` are the objects of the lease in the order of the match. `verified` records which tuples are verified.
  void Land(SessionId session, TenantId tenant, LandingId id, std::span<const ObjectTable::Result> found,
            std::shared_ptr<VerifiedLayers> verified, LandTarget target, LandCallbacks callbacks);
  // Cancels; `quiet` is called after the verdict, or immediately for an unknown landing.
  void Quiesce(SessionId session, LandingId id, std::function<void()> quiet);
  void CloseSession(SessionId session);  // cancels all of it

  size_t landings() const { return landings_.size(); }

 private:
  struct ActiveLanding {
    TenantId tenant;
    std::vector<ObjectTable::Reference> objects;  // one per requested segment; empty for missing ones
    std::vector<MissReason> verdict;
    std::vector<uint64_t> bytes;     // bytes to move or verify, per object
    std::vector<size_t> moving;      // indices of objects that the mover lands
    std::vector<uint32_t> segments;  // their indices in the match
    std::vector<uint32_t> layers;    // attention layers in landing order
    std::shared_ptr<VerifiedLayers> verified;
    CancelFlag cancel;
    std::function<void()> resume;  // set while it waits for bytes that are being loaded
    Nanos started = 0;
    Nanos waited = 0;                    // total waiting time
    std::optional<Nanos> waiting_since;  // set while it waits
    LandCallbacks callbacks;
    std::vector<std::function<void()>> quiet;
    uint64_t held_bytes = 0;  // held by the request
  };
  using Name = std::pair<SessionId, LandingId>;

  // Decides what can land; returns the mover's part.
  static std::vector<LandSource> Sort(ActiveLanding& landing, std::span<const ObjectTable::Result> found,
                                      const LandTarget& target);
  bool MayBegin(SessionId session, const ActiveLanding& landing);
  void Start(const Name& name, std::vector<LandSource> sources, LandTarget target);
  std::optional<uint64_t> Loaded(const Name& name, size_t source);
  void Blocked(const Name& name, size_t source, uint64_t bytes, std::function<void()> resume);
  void Cancel(ActiveLanding& landing);
  void Progress(const Name& name, uint32_t layers);
  void Corrupt(const Name& name, size_t source);
  static void Verified(const ActiveLanding& landing, uint32_t below);
  void Finish(const Name& name, MissReason outcome);
  void Measure(const ActiveLanding& landing);
  void Conclude(ActiveLanding landing);

  ObjectTable& table_;
  Mover& mover_;
  const Clock& clock_;
  SessionTransfers& transfers_;
  InFlight& in_flight_;
  Rates& byte_rates_;
  const size_t per_session_;
  Observer& observer_;
  std::map<Name, ActiveLanding> landings_;
  std::map<SessionId, size_t> of_session_;  // only sessions with landings
};

}  // namespace ashlar::storage
