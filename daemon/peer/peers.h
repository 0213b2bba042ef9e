// SPDX-License-Identifier: Apache-2.0
// Peers: this node's cooperation with other nodes, without the protocol: fetching, serving and announcing objects.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/observe/cluster_metrics.h"
#include "daemon/peer/announcer.h"
#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/peer_probes.h"
#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/connected_peers.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/fetch/remote_lookup.h"
#include "daemon/peer/fetch/remote_objects.h"
#include "daemon/peer/fetch/remote_prefill.h"
#include "daemon/peer/holder.h"
#include "daemon/peer/offers/drain_transfer.h"
#include "daemon/peer/offers/offer_taker.h"
#include "daemon/peer/offers/offerer.h"
#include "daemon/peer/offers/prompt_handoff.h"
#include "daemon/peer/offers/replicas.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::daemon {

struct PeersOptions {
  std::string self;  // name of this node
  RemoteObjects::Options objects;
  RemoteLookup::Options lookup;
  Holder::Options holder;
  OfferTaker::Options offers;
  DrainTransfer::Options drain_transfer;
  Replicas::Options replicas;
  AnnounceMode announce = AnnounceMode::kUsedTwice;
  std::vector<std::optional<uint8_t>> gpus;  // GPU of each memory tier (Announcer)
};

struct PeersStats {
  RemoteObjects::Stats objects;
  RemoteLookup::Stats lookup;
  Holder::Stats holder;
  OfferTaker::Stats offered;                       // received offers
  Offerer::Stats drained, replicated, handed_off;  // offers made by this node
};

// Peers call it on any thread. Everything except lookup() belongs to the metadata thread.
class Peers final : public PeerCalls {
 public:
  // All must outlive the object. `names` are the tenant names by number.
  Peers(EventLoop& loop, const storage::Clock& clock, const std::vector<std::string>& names, Directory& directory,
        Transport& transport, PeerAsker& asker, PrefillAsker& prefill_asker, const PeersOptions& options);

  // For the options of the cache's tiers, which are created before the cache.
  storage::RemoteSource& source() { return objects_; }
  storage::ReportResidence residence();
  // Call once before any other call. `tiers` as in Holder.
  void Start(storage::Cache& cache, std::vector<const storage::Tier*> tiers);
  // Call once. Lets other nodes use engines here that offer prefill, and this node use theirs.
  void Route(Router& router);
  // Finds objects of other nodes for an engine's prompt. Any thread.
  RemoteLookup& lookup() { return lookup_; }
  // Sends texts to the nodes that continue them. After Start. The metadata thread only.
  PromptHandoff& handoff() { return *handoff_; }

  // A node that this one fetches from has left.
  void Lost(const Member& member) { objects_.Gone(member); }
  // The directory lost all entries: announce everything again.
  void AnnounceAgain() { announcer_.Again(); }
  // The cache has begun to drain, or has ended draining. While draining, what is in memory only is offered to other
  // nodes.
  void SetDraining(bool draining);
  // Returns whether drain transfers or prefill handoffs are in flight; a drain waits for them.
  bool transferring() const { return drain_transfer_->busy() || handoff_->busy(); }
  void Flush();  // work that does not wait for Tick; call it many times per second
  void Tick();   // call it about once per second
  // Stops offering and taking objects, and answers pending offers.
  void EndOffers();
  // Ends fetches, and revokes what other nodes hold. Returns false while bytes are in transfer; call again. After it
  // returns true, the transport may be destroyed.
  bool Stop();
  PeersStats stats() const;
  // Returns the nodes that failed to answer and have not answered since. Lookups skip them.
  std::set<std::string> Unreachable() const { return rates_.Failing(); }
  // Connected nodes that have opened objects, as ConnectedPeers::ReaderOf names them.
  std::vector<std::string> Readers() const { return holder_->Readers(); }
  // Figures of the other members in the directory: the first `most` by name. `transport` are recent stats. `connected`
  // is for calls.
  std::vector<PeerFigures> PerNode(const TransportStats& transport, size_t most,
                                   const std::function<bool(const Member&)>& connected) const;

  // PeerCalls. RESOURCE_EXHAUSTED if the metadata queue is full.
  void PeerHere(const PeerHello& peer) override { connected_.Connected(peer); }
  void PeerGone(const std::string& node) override { connected_.Disconnected(node); }
  void Open(const PeerHello& peer, storage::TenantId tenant, PeerOpen open,
            Done<std::vector<PeerOpened>> done) override;
  void Renew(const PeerHello& peer, PeerRenew renew, Done<std::vector<uint32_t>> done) override;
  void Close(const PeerHello& peer, std::vector<PeerLease> leases) override;
  void Offer(const PeerHello& peer, storage::TenantId tenant, PeerOffer offer,
             Done<std::vector<TakeOutcome>> done) override;
  void Workers(const PeerHello& peer, storage::TenantId tenant, const NamespaceId& ns,
               Done<std::vector<PeerWorker>> done) override;
  void Prefill(const PeerHello& peer, storage::TenantId tenant, PeerPrefill prefill, Done<PeerOpened> done) override;
  void Probe(const PeerHello& peer, storage::TenantId tenant, PeerProbe probe, Done<v1::NodeProbe> done) override;

 private:
  // Drops measurements of nodes that left long ago, and their addresses immediately.
  void DropDepartedPeers();

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
  std::unique_ptr<DrainTransfer> drain_transfer_;
  std::unique_ptr<PromptHandoff> handoff_;
  std::unique_ptr<Replicas> replicas_;
  bool draining_ = false, stopped_ = false;
  std::map<std::string, storage::Nanos> members_;  // nodes, and when each was last in the directory
  Router* router_ = nullptr;                       // null if no engine here is asked to prefill
  ConnectedPeers connected_;                       // what a reader holds is revoked when it disconnects
};

}  // namespace ashlar::daemon
