// SPDX-License-Identifier: Apache-2.0
// Peers: what this node does with others, apart from how they talk: it fetches from them, serves them, and says what it
// holds.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/observe/cluster_metrics.h"
#include "daemon/peer/announcer.h"
#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/peer_probes.h"
#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/fetch/remote_lookup.h"
#include "daemon/peer/fetch/remote_objects.h"
#include "daemon/peer/fetch/remote_prefill.h"
#include "daemon/peer/holder.h"
#include "daemon/peer/offers/drain_hand_over.h"
#include "daemon/peer/offers/offer_taker.h"
#include "daemon/peer/offers/offerer.h"
#include "daemon/peer/offers/prompt_hand_off.h"
#include "daemon/peer/offers/replicas.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::daemon {

struct PeersOptions {
  std::string self;  // this node's name
  RemoteObjects::Options objects;
  RemoteLookup::Options lookup;
  Holder::Options holder;
  OfferTaker::Options offers;
  DrainHandOver::Options hand_over;
  Replicas::Options replicas;
  AnnounceMode announce = AnnounceMode::kUsedTwice;
  std::vector<std::optional<uint8_t>> gpus;  // of this node's memory tiers (Announcer)
};

struct PeersStats {
  RemoteObjects::Stats objects;
  RemoteLookup::Stats lookup;
  Holder::Stats holder;
  OfferTaker::Stats offered;                           // to this node
  Offerer::Stats handed_over, replicated, handed_off;  // by this node
};

// Peers call it on any thread; all else but lookup() belongs to the metadata thread.
class Peers final : public PeerCalls {
 public:
  // All must outlive it. `names`: the tenants' names, by number.
  Peers(EventLoop& loop, const storage::Clock& clock, const std::vector<std::string>& names, Directory& directory,
        Transport& transport, PeerAsker& asker, PrefillAsker& prefill_asker, const PeersOptions& options);

  // For the cache's tiers and options, which are made before it.
  storage::RemoteSource& source() { return objects_; }
  storage::TellResidence residence();
  // Once, before anybody calls. `tiers`: as the holder's.
  void Start(storage::Cache& cache, std::vector<const storage::Tier*> tiers);
  // Once, likewise: gives the engines here that offer prefill to other nodes, and theirs to this one.
  void Route(Router& router);
  // Finds the objects of other nodes that an engine's prompt may use. Any thread.
  RemoteLookup& lookup() { return lookup_; }
  // Hands texts to the nodes that go on with them; after Start. The metadata thread only.
  PromptHandOff& hand_off() { return *hand_off_; }

  // A node that this one fetches from has gone.
  void Lost(const Member& member) { objects_.Gone(member); }
  // The directory is to be told of everything again.
  void AnnounceAgain() { announcer_.Again(); }
  // The cache has begun to drain, or has ended that: what memory alone has is offered to other nodes.
  void SetDraining(bool draining);
  // Objects or prompts are being handed to other nodes: a drain waits for that.
  bool handing_over() const { return hand_over_->busy() || hand_off_->busy(); }
  void Flush();  // what does not wait for Tick: call it many times a second
  void Tick();   // call it about once a second
  // Nothing is offered or taken any more, and offers that wait are answered.
  void EndOffers();
  // Ends what is fetched, and takes back what other nodes hold. False: something of it still moves; call again. The
  // transport may go when it has returned true.
  bool Stop();
  PeersStats stats() const;
  // Nodes that failed to answer and have not answered since: lookups do not ask them.
  std::set<std::string> Unreachable() const { return rates_.Failing(); }
  // Those that have asked and have not gone, by ReaderOf.
  std::vector<std::string> Readers() const { return holder_->Readers(); }
  // A connection that was made anew is of the same reader; a daemon that has started again is another one.
  static std::string ReaderOf(const PeerHello& peer);
  // Of the other members that the directory has, the first `most` by their names. `transport`: its stats, a moment old.
  // `connected`: for calls.
  std::vector<PeerFigures> PerNode(const TransportStats& transport, size_t most,
                                   const std::function<bool(const Member&)>& connected) const;

  // PeerCalls. A request that finds no room on the metadata thread is refused with RESOURCE_EXHAUSTED.
  void PeerHere(const PeerHello& peer) override;
  void PeerGone(const std::string& node) override;
  void Open(const PeerHello& peer, storage::TenantId tenant, PeerOpen open,
            Done<std::vector<PeerOpened>> done) override;
  void Renew(const PeerHello& peer, PeerRenew renew, Done<std::vector<uint32_t>> done) override;
  void Close(const PeerHello& peer, std::vector<PeerLease> leases) override;
  void Offer(const PeerHello& peer, storage::TenantId tenant, PeerOffer offer,
             Done<std::vector<TakeOutcome>> done) override;
  void Workers(const PeerHello& peer, storage::TenantId tenant, const NamespaceId& ns,
               Done<std::vector<PeerWorker>> done) override;
  void Prefill(const PeerHello& peer, storage::TenantId tenant, PeerPrefill prefill, Done<PeerOpened> done) override;

 private:
  void PostGone(const std::string& name);
  // Erases what was measured of nodes that have been no members for long, and their addresses at once.
  void DropStrangers();
  // The peer has not gone since, nor started again: what it holds from now on is taken back when it has.
  bool IsHere(const PeerHello& peer);

  EventLoop& loop_;
  const storage::Clock& clock_;
  Transport& transport_;
  PeerAsker& asker_;
  Directory& directory_;
  const PeersOptions options_;
  PeerRates rates_;
  PeerProbes probes_;
  Opener opener_;
  RemoteObjects objects_;
  RemoteLookup lookup_;
  RemotePrefill prefill_;
  Announcer announcer_;
  storage::Cache* cache_ = nullptr;
  std::unique_ptr<Holder> holder_;
  Offerer offerer_;
  std::unique_ptr<OfferTaker> taker_;
  std::unique_ptr<DrainHandOver> hand_over_;
  std::unique_ptr<PromptHandOff> hand_off_;
  std::unique_ptr<Replicas> replicas_;
  bool draining_ = false, stopped_ = false;
  std::map<std::string, storage::Nanos> members_;  // nodes, and when each was last seen in the directory
  Router* router_ = nullptr;                       // null: no engine here is asked to prefill
  std::mutex mutex_;
  std::map<std::string, std::string> here_;  // nodes that have greeted, as the holder knows them; guarded by mutex_
};

}  // namespace ashlar::daemon
