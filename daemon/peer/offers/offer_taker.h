// SPDX-License-Identifier: Apache-2.0
// OfferTaker: decides which offered objects this node takes, and fetches them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/fetch/remote_objects.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// Number of offered objects by outcome.
using OfferCounts = std::map<TakeOutcome, uint64_t>;

// An offered object is fetched like one that an engine requests: opened at its holder, read under grants, and verified
// when it lands. It never displaces a more valuable object, except if an engine of this node is about to use it: then
// it is loaded as by a lookup of that engine. The metadata thread only.
class OfferTaker {
 public:
  struct Options {
    // Bytes in flight; further offers are declined. One node may use at most as much as it leaves free, so a stalled
    // node leaves half to the others.
    uint64_t bytes = uint64_t{256} << 20;
    size_t objects = 1024;
    size_t calls = 256;  // offers waiting for their answer
  };
  struct Stats {
    OfferCounts outcomes;    // kTimedOut: replied as timed out, whatever the later result
    uint64_t bytes = 0;      // bytes taken
    uint64_t under_way = 0;  // objects in flight, each once
  };
  using Answer = std::function<void(std::vector<TakeOutcome>)>;

  // All must outlive the object.
  OfferTaker(const storage::Clock& clock, const Directory& directory, Opener& opener, RemoteObjects& objects,
             const PeerRates& rates, storage::Cache& cache, const Options& options)
      : clock_(clock),
        directory_(directory),
        opener_(opener),
        objects_(objects),
        rates_(rates),
        cache_(cache),
        options_(options) {}

  // `node` makes an offer. `answer` is called once, when all objects are settled or the offer's patience has passed.
  void Offer(const std::string& node, storage::TenantId tenant, const PeerOffer& offer, Answer answer);
  // Call it many times per second.
  void Tick();
  // Answers all pending offers. No further object is taken.
  void Stop();
  const Stats& stats() const { return stats_; }

 private:
  struct Call {
    std::vector<TakeOutcome> outcomes;
    size_t open = 0;  // objects without an outcome
    storage::Nanos until = 0;
    Answer answer;  // empty once answered
  };
  struct Wanted {
    storage::Offering offering;
    size_t index = 0;  // index in the offer
  };
  // An object in flight and the offers that wait for it.
  struct Coming {
    std::string node;  // first node that offered it
    uint64_t bytes = 0;
    size_t offers = 0;
  };
  struct Share {
    uint64_t bytes = 0;
    size_t objects = 0;
  };
  using Place = std::pair<storage::TenantId, Key>;
  static Place PlaceOf(const storage::Offering& offering) { return {offering.pool.tenant, offering.key}; }
  bool MayTake(const std::string& node, const storage::Offering& offering) const;
  void Begins(const std::string& node, const storage::Offering& offering);
  void Ends(const storage::Offering& offering);
  TakeOutcome Judge(const storage::Offering& offering, OfferKind kind);
  void Opened(const std::shared_ptr<Call>& call, OfferKind kind, const std::vector<Wanted>& wanted,
              Opener::Opened opened);
  void Take(const std::shared_ptr<Call>& call, OfferKind kind, const Wanted& wanted,
            std::span<absl::StatusOr<OpenedObject>> shards);
  void Settle(const std::shared_ptr<Call>& call, const Wanted& wanted, TakeOutcome outcome);
  void AnswerNow(Call& call);

  const storage::Clock& clock_;
  const Directory& directory_;
  Opener& opener_;
  RemoteObjects& objects_;
  const PeerRates& rates_;
  storage::Cache& cache_;
  const Options options_;
  std::list<std::shared_ptr<Call>> calls_;
  std::map<Place, Coming> coming_;
  std::map<std::string, Share> shares_;  // shares in flight, keyed by node
  uint64_t bytes_ = 0;                   // bytes in flight
  bool stopped_ = false;
  Stats stats_;
};

}  // namespace ashlar::daemon
