// SPDX-License-Identifier: Apache-2.0
// OfferTaker: judges what other nodes offer, and fetches what this one wants of it.
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

// How many offered objects came to which end; by TakeOutcome.
using OfferCounts = std::map<TakeOutcome, uint64_t>;

// An offered object comes as one that an engine asks for does: opened at its holder, under grants, and verified when it
// lands. It never takes the place of anything that is worth more, but for what an engine here is about to go on with:
// that is brought up as a look-up of this engine would. The metadata thread only.
class OfferTaker {
 public:
  struct Options {
    // On their way at a time; of more, an offer is declined. One node has at most as much of it as it leaves free: a
    // node that stands still leaves half to all others.
    uint64_t bytes = uint64_t{256} << 20;
    size_t objects = 1024;
    size_t calls = 256;  // that wait for their answer
  };
  struct Stats {
    OfferCounts outcomes;    // kLate: answered so, whatever became of it later
    uint64_t bytes = 0;      // of what was taken
    uint64_t under_way = 0;  // objects, each once
  };
  using Answer = std::function<void(std::vector<TakeOutcome>)>;

  // All must outlive it.
  OfferTaker(const storage::Clock& clock, const Directory& directory, Opener& opener, RemoteObjects& objects,
             const PeerRates& rates, storage::Cache& cache, const Options& options)
      : clock_(clock),
        directory_(directory),
        opener_(opener),
        objects_(objects),
        rates_(rates),
        cache_(cache),
        options_(options) {}

  // `node` offers; `answer` comes once, when all is settled or the offer's patience is over.
  void Offer(const std::string& node, storage::TenantId tenant, const PeerOffer& offer, Answer answer);
  // Call it many times a second.
  void Tick();
  // Answers all that wait. Nothing is taken any more.
  void Stop();
  const Stats& stats() const { return stats_; }

 private:
  struct Call {
    std::vector<TakeOutcome> outcomes;
    size_t open = 0;  // objects whose outcome is not known
    storage::Nanos until = 0;
    Answer answer;  // empty: it was answered
  };
  struct Wanted {
    storage::Offering offering;
    size_t index = 0;  // in the offer
  };
  // An object on its way, and how many offers of it wait for that.
  struct Coming {
    std::string node;  // that offered it first
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
  TakeOutcome Judge(const storage::Offering& offering, OfferKind why);
  void Opened(const std::shared_ptr<Call>& call, OfferKind why, const std::vector<Wanted>& wanted,
              Opener::Opened opened);
  void Take(const std::shared_ptr<Call>& call, OfferKind why, const Wanted& wanted,
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
  std::map<std::string, Share> shares_;  // of what is on its way, by node
  uint64_t bytes_ = 0;                   // on their way
  bool stopped_ = false;
  Stats stats_;
};

}  // namespace ashlar::daemon
