// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/peers.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/host_port.h"
#include "proto/prefill_limits.h"

namespace ashlar::daemon {
namespace {

// How long a departed node's measured rates are kept: a restarted daemon does not begin without them.
constexpr storage::Nanos kRemembered = storage::Nanos{600} * 1'000'000'000;

constexpr char kGone[] = "the requesting node has disconnected";

}  // namespace

Peers::Peers(EventLoop& loop, const storage::Clock& clock, const std::vector<std::string>& names, Directory& directory,
             Transport& transport, PeerAsker& asker, PrefillAsker& prefill_asker, const PeersOptions& options)
    : loop_(loop),
      clock_(clock),
      transport_(transport),
      asker_(asker),
      directory_(directory),
      options_(options),
      probes_(loop, clock, directory, asker, rates_),
      opener_(loop, clock, directory, asker, rates_, names),
      objects_(loop, clock, transport, opener_, rates_, options.objects),
      lookup_(loop, clock, directory, opener_, rates_, options.lookup),
      prefill_(loop, clock, directory, prefill_asker, opener_, objects_, rates_, names, options.self),
      announcer_(directory, options.announce, options.gpus),
      offerer_(loop, asker, names),
      connected_([this](const std::string& reader) {
        loop_.PostCompletion(storage::kNoTenant, [this, reader] {
          if (router_ != nullptr) router_->for_nodes().NodeGone(reader);
          holder_->Gone(reader);
        });
      }) {}

storage::ReportResidence Peers::residence() {
  return [this](const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence) {
    return announcer_.Resides(pool, header, residence);
  };
}

void Peers::Start(storage::Cache& cache, std::vector<const storage::Tier*> tiers) {
  cache_ = &cache;
  lookup_.Start(cache, objects_);
  prefill_.Start(cache);
  Holder::Options holder = options_.holder;
  holder.gave = [this](const std::string& node, storage::TenantId tenant, const Key& key) {
    replicas_->Asked(node, tenant, key);
  };
  // During a drain only nodes that take drained objects may open leases here; other leases would delay the drain.
  holder.gives = [this] { return !draining_ || transferring(); };
  holder_ = std::make_unique<Holder>(loop_, clock_, transport_, cache, std::move(tiers), holder);
  taker_ = std::make_unique<OfferTaker>(clock_, directory_, opener_, objects_, rates_, cache, options_.offers);
  drain_transfer_ = std::make_unique<DrainTransfer>(clock_, directory_, offerer_, cache, options_.drain_transfer);
  handoff_ = std::make_unique<PromptHandoff>(clock_, directory_, offerer_, cache,
                                             PromptHandoff::Options{.self = options_.self});
  replicas_ = std::make_unique<Replicas>(clock_, directory_, offerer_, cache, options_.replicas);
}

void Peers::SetDraining(bool draining) {
  draining_ = draining;
  draining ? drain_transfer_->Start() : drain_transfer_->End();
}

void Peers::Route(Router& router) {
  router_ = &router;
  router.Attach(&prefill_);
}

void Peers::Flush() {
  opener_.Flush();
  if (!stopped_) probes_.Tick();
  lookup_.Tick();
  objects_.Flush();
  cache_->offers().ReportArrivals();
  taker_->Tick();
  drain_transfer_->Tick();
  handoff_->Tick();
  replicas_->Tick();
  prefill_.Tick();
  announcer_.Flush(
      [this](storage::ReportWalk& walk, storage::Slice& slice) { return cache_->residences().ReportAll(walk, slice); });
}

void Peers::EndOffers() {
  taker_->Stop();
  drain_transfer_->End();
  handoff_->Stop();
}

void Peers::Tick() {
  holder_->Tick();
  objects_.Tick(asker_);
  announcer_.Tick();
  DropDepartedPeers();
}

void Peers::DropDepartedPeers() {
  if (stopped_) return;  // no peers are left
  const storage::Nanos now = clock_.Now();
  std::vector<HostPort> addresses;
  for (const std::shared_ptr<const Member>& member : directory_.Members()) {
    members_[member->node] = now;
    absl::StatusOr<HostPort> address = ParseHostPort(member->transport_address);
    if (address.ok()) addresses.push_back(*std::move(address));
  }
  std::erase_if(members_, [&](const auto& each) { return now - each.second > kRemembered; });
  std::set<std::string> nodes;
  for (const auto& [node, seen] : members_) nodes.insert(node);
  rates_.Keep(nodes);
  holder_->Keep(nodes);
  transport_.KeepPeers(std::move(addresses));
}

bool Peers::Stop() {
  stopped_ = true;
  EndOffers();
  cache_->offers().ReportArrivals();
  objects_.Stop();
  holder_->CloseAll();
  opener_.Flush();
  return objects_.stats().reading == 0;
}

PeersStats Peers::stats() const {
  return {.objects = objects_.stats(),
          .lookup = lookup_.stats(),
          .holder = holder_->stats(),
          .offered = taker_->stats(),
          .drained = offerer_.stats(OfferKind::kDrain),
          .replicated = offerer_.stats(OfferKind::kHot),
          .handed_off = offerer_.stats(OfferKind::kHandoff)};
}

std::vector<PeerFigures> Peers::PerNode(const TransportStats& transport, size_t most,
                                        const std::function<bool(const Member&)>& connected) const {
  std::map<std::string, const PeerStats*> by_address;
  for (const PeerStats& peer : transport.peers) {
    if (!peer.accepted) by_address[peer.peer] = &peer;
  }
  const auto here = holder_->ByNode();
  const auto there = objects_.HeldByNode();
  std::map<std::string, PeerFigures> figures;
  for (const std::shared_ptr<const Member>& member : directory_.Members()) {
    if (member->node == options_.self) continue;
    const PeerRates::Figures rates = rates_.Of(member->node);
    PeerFigures each{.node = member->node,
                     .version = member->version,
                     .control_address = member->control_address,
                     .transport_address = member->transport_address,
                     .connected = connected(*member),
                     .bytes_per_second = rates.bytes_per_second,
                     .rtt_seconds = static_cast<double>(rates.rtt) * 1e-9,
                     .received_bytes = rates.bytes,
                     .failed_calls = rates.failed_calls,
                     .stalls = rates.stalls};
    const absl::StatusOr<HostPort> address = ParseHostPort(member->transport_address);
    const auto bytes =
        address.ok() ? by_address.find(absl::StrCat(address->host, ":", address->port)) : by_address.end();
    if (bytes != by_address.end()) {
      each.path = bytes->second->path;
      each.lanes = bytes->second->lanes;
      each.lost_connections = bytes->second->failures;
    }
    if (const auto found = here.find(member->node); found != here.end()) {
      each.held_here = found->second.leases;
      each.held_here_bytes = found->second.bytes;
      each.sent_bytes = found->second.given;
    }
    if (const auto found = there.find(member->node); found != there.end()) {
      each.held_there = found->second.copies;
      each.held_there_bytes = found->second.bytes;
    }
    figures[member->node] = std::move(each);
  }
  std::vector<PeerFigures> list;
  for (auto& [node, each] : figures) {
    if (list.size() < most) list.push_back(std::move(each));
  }
  return list;
}

void Peers::Open(const PeerHello& peer, storage::TenantId tenant, PeerOpen open, Done<std::vector<PeerOpened>> done) {
  struct Call {
    PeerHello peer;
    PeerOpen open;
    std::vector<PeerOpened> opened;
  };
  const auto call = std::make_shared<Call>(Call{.peer = peer, .open = std::move(open), .opened = {}});
  const bool posted = loop_.Post(tenant, [this, tenant, call, done](storage::Slice& slice) {
    if (!connected_.Has(call->peer)) {
      done(absl::UnavailableError(kGone));
      return true;
    }
    if (!holder_->Open(ConnectedPeers::ReaderOf(call->peer), tenant, call->open, call->opened, slice)) return false;
    done(std::move(call->opened));
    return true;
  });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

void Peers::Offer(const PeerHello& peer, storage::TenantId tenant, PeerOffer offer,
                  Done<std::vector<TakeOutcome>> done) {
  const bool posted = loop_.Post(tenant, [this, node = peer.node, tenant, offer = std::move(offer), done] {
    taker_->Offer(node, tenant, offer, [done](std::vector<TakeOutcome> outcomes) { done(std::move(outcomes)); });
  });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

void Peers::Renew(const PeerHello& peer, PeerRenew renew, Done<std::vector<uint32_t>> done) {
  const bool posted = loop_.PostRelease(storage::kNoTenant,
                                        [this, node = ConnectedPeers::ReaderOf(peer), renew = std::move(renew), done] {
                                          std::vector<uint32_t> lives;
                                          for (const PeerLease& lease : renew.leases)
                                            lives.push_back(holder_->Renew(node, lease, renew.lease_ms));
                                          done(std::move(lives));
                                        });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

void Peers::Close(const PeerHello& peer, std::vector<PeerLease> leases) {
  loop_.PostCompletion(storage::kNoTenant, [this, node = ConnectedPeers::ReaderOf(peer), leases = std::move(leases)] {
    for (const PeerLease& lease : leases) holder_->Close(node, lease);
  });
}

void Peers::Workers(const PeerHello&, storage::TenantId tenant, const NamespaceId& ns,
                    Done<std::vector<PeerWorker>> done) {
  const bool posted = loop_.Post(tenant, [this, tenant, ns, done] {
    std::vector<PeerWorker> workers;
    if (router_ == nullptr) return done(workers);
    for (const PrefillWorkers::Offer& offer : router_->workers().Offers(tenant, ns)) {
      if (workers.size() == limits::kMaxPeerWorkers) break;
      workers.push_back({.worker = offer.worker,
                         .tokens_per_second = offer.tokens_per_second,
                         .queued_tokens = offer.queued_tokens,
                         .capacity = static_cast<uint32_t>(offer.capacity)});
    }
    done(std::move(workers));
  });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

// Computed and published here, then opened like any object.
void Peers::Prefill(const PeerHello& peer, storage::TenantId tenant, PeerPrefill prefill, Done<PeerOpened> done) {
  const auto asked = std::make_shared<const PeerPrefill>(std::move(prefill));
  const auto ended = [this, peer, tenant, asked, done](const absl::Status& status) {
    if (!status.ok()) return done(status);
    if (!connected_.Has(peer)) return done(absl::UnavailableError(kGone));
    std::vector<PeerOpened> opened;
    storage::Slice whole;
    const PeerOpen open{.objects = {{.key = asked->key, .shard = {}}}, .lease_ms = asked->lease_ms};
    holder_->Open(ConnectedPeers::ReaderOf(peer), tenant, open, opened, whole);
    done(std::move(opened.front()));
  };
  const bool posted = loop_.Post(tenant, [this, peer, tenant, asked, ended] {
    if (!connected_.Has(peer)) return ended(absl::UnavailableError(kGone));
    if (router_ == nullptr) return ended(absl::UnavailableError("no engine on this node offers prefill"));
    const PrefillWork work{.tenant = tenant,
                           .ns = asked->ns,
                           .key = asked->key,
                           .kind = asked->kind,
                           .tokens = asked->tokens.size() / sizeof(int32_t),
                           .packed = std::shared_ptr<const std::string>(asked, &asked->tokens)};
    router_->for_nodes().Compute(ConnectedPeers::ReaderOf(peer), asked->worker, work,
                                 storage::Nanos{1'000'000} * asked->patience_ms, ended);
  });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

void Peers::Probe(const PeerHello&, storage::TenantId tenant, PeerProbe probe, Done<v1::NodeProbe> done) {
  PromptProber* const prober = router_ == nullptr ? nullptr : router_->probes().here();
  if (prober == nullptr) return done(absl::NotFoundError("ns: no engine on this node has opened the model"));
  const ProbedModel model{.ns = std::string(probe.ns.bytes.begin(), probe.ns.bytes.end()), .model_id = ""};
  prober->ProbeHere(tenant, model, std::move(probe.prompt),
                    [done = std::move(done)](absl::StatusOr<PromptProber::Here> here) {
                      if (!here.ok()) return done(here.status());
                      done(std::move(here->node));
                    });
}

}  // namespace ashlar::daemon
