// SPDX-License-Identifier: Apache-2.0
// PeerNode: a cluster node inside a test process: a cache with its threads, a transport on loopback, and peers that it
// calls without a control plane.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/peer/peers.h"
#include "daemon/runtime/worker_pool.h"
#include "kernels/gpu.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/mutex.h"
#include "proto/limits.h"
#include "storage/testing/engine.h"
#include "storage/testing/rig.h"
#include "storage/tier/memory_tier.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/mover.h"

namespace ashlar::daemon {

class PeerNode;

// All nodes of a test, and what they have announced.
class TestCluster final {
 public:
  struct Announced {
    std::shared_ptr<const Member> member;
    Key key;
    NamespaceId ns;
    Holding holding;
  };
  Mutex mutex;
  std::vector<Announced> announced ABSL_GUARDED_BY(mutex);
  std::map<std::string, PeerNode*> nodes ABSL_GUARDED_BY(mutex);  // reachable nodes
  std::vector<ClusterErasure> erasures ABSL_GUARDED_BY(mutex);
};

// One node's view of the cluster.
class TestDirectory : public Directory {
 public:
  TestDirectory(TestCluster& cluster, std::string self) : cluster_(cluster), self_(std::move(self)) {}
  std::shared_ptr<const Member> member;  // this node

  bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double) override {
    Withdraw(ns, key, holding.shard);
    MutexLock lock(cluster_.mutex);
    cluster_.announced.push_back({member, key, ns, holding});
    return true;
  }
  void Withdraw(const NamespaceId&, const Key& key, const TensorShard& shard) override {
    MutexLock lock(cluster_.mutex);
    std::erase_if(cluster_.announced, [&](const TestCluster::Announced& one) {
      return one.member == member && one.key == key && one.holding.shard == shard;
    });
  }
  size_t RemainingCapacity() const override { return SIZE_MAX; }
  bool WasDisplaced(const NamespaceId&, const Key&, const TensorShard&) const override { return false; }
  void Follow(const NamespaceId&) override {}
  void Unfollow(const NamespaceId&) override {}
  std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const override {
    MutexLock lock(cluster_.mutex);
    std::vector<Located> located;
    for (size_t i = 0; i < keys.size(); ++i) {
      for (const TestCluster::Announced& one : cluster_.announced) {
        if (one.member != member && one.key == keys[i] && one.ns == ns) located.push_back({i, one.member, one.holding});
      }
    }
    return located;
  }
  std::vector<uint64_t> Depths(const NamespaceId& ns, uint64_t end, size_t most) const override {
    return DepthsOf(ObjectKind::kCheckpoint, ns, 0, end, most);
  }
  std::vector<uint64_t> SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const override {
    return DepthsOf(ObjectKind::kSpan, ns, begin, end, most);
  }
  void Erase(const ClusterErasure& erasure, std::function<void(const absl::Status&)> done) override {
    {
      MutexLock lock(cluster_.mutex);
      cluster_.erasures.push_back(erasure);
      cluster_.erasures.back().revision = static_cast<int64_t>(cluster_.erasures.size());
    }
    done(absl::OkStatus());
  }
  std::vector<ClusterErasure> Erasures() const override {
    MutexLock lock(cluster_.mutex);
    return cluster_.erasures;
  }
  void Erased(int64_t revision) override { erased = revision; }
  bool BeingErased(const std::string& tenant, const NamespaceId& ns) const override;
  std::atomic<int64_t> erased{0};
  std::vector<std::shared_ptr<const Member>> Members() const override;
  DirectoryHealth Health() const override { return {.connected = true}; }
  DirectoryStats Stats() const override { return {}; }

 private:
  std::vector<uint64_t> DepthsOf(ObjectKind kind, const NamespaceId& ns, uint64_t begin, uint64_t end,
                                 size_t most) const {
    MutexLock lock(cluster_.mutex);
    std::set<uint64_t, std::greater<>> depths;
    for (const TestCluster::Announced& one : cluster_.announced) {
      const Holding& holding = one.holding;
      if (one.member == member || one.ns != ns || holding.kind != kind || holding.span_begin != begin) continue;
      if (holding.depth > 0 && holding.depth <= end) depths.insert(holding.depth);
    }
    std::vector<uint64_t> deepest(depths.begin(), depths.end());
    deepest.resize(std::min(deepest.size(), most));
    return deepest;
  }

  TestCluster& cluster_;
  const std::string self_;
};

// A node's tier on a GPU, above dram, for engines of session PeerNode::kOnGpu.
struct GpuTier {
  const kernels::Gpu* gpu = nullptr;  // null without a GPU
  uint64_t extents = 64;
  TransportSurroundings surroundings = TransportSurroundings::OfThisProcess();
};

class PeerNode final : public PeerAsker, public PrefillAsker {
 public:
  template <typename Work>
  auto OnLoop(Work work) {
    std::promise<decltype(work())> result;
    loop.PostCompletion(storage::kNoTenant, [&] {
      if constexpr (std::is_void_v<decltype(work())>) {
        work();
        result.set_value();
      } else {
        result.set_value(work());
      }
    });
    return result.get_future().get();
  }

  PeerNode(TestCluster& cluster, const std::string& name, uint64_t extents = 256, PeersOptions options = All(),
           RemoteReads reads = RemoteReads::kNever, const GpuTier& on_gpu = {})
      : cluster_(cluster),
        name_(name),
        directory(cluster, name),
        hbm(MakeTier(TierKind::kHbm, on_gpu.extents, on_gpu.gpu)),
        tier(MakeTier(TierKind::kDram, extents, on_gpu.gpu)),
        lane(on_gpu.gpu == nullptr ? nullptr : *storage::GpuLane::Make(*on_gpu.gpu, 2)),
        transport(*Transport::Start(OptionsOfTransport(reads, on_gpu.gpu), on_gpu.surroundings)),
        peers(loop, clock, Tenants(), directory, *transport, *this, *this, options),
        mover(kernels::Reference(), threads, workers, *tier, storage::kTurnBytes, Lanes()),
        cache(Options(), TiersOfNode(), mover, workers, clock, &observer) {
    static std::atomic<uint64_t> incarnations{0};
    const HostPort address = transport->address();
    directory.member =
        std::make_shared<const Member>(Member{.node = name,
                                              .incarnation = ++incarnations,
                                              .transport_address = address.host + ":" + std::to_string(address.port)});
    for (storage::MemoryTier* memory : {hbm.get(), tier.get()}) {
      if (memory != nullptr) Holder::RegisterArenas(*transport, *memory);
    }
    const std::vector<storage::Tier*> tiers = TiersOfNode().memory;
    peers.Start(cache, {tiers.begin(), tiers.end()});
    for (const storage::SessionId session : {kEngine, kOnGpu}) cache.OpenSession(session, 0);
    cache.OpenSession(kOther, 1);
    if (hbm != nullptr) cache.SetLevel(kOnGpu, 0);
    loop.Every(5'000'000, [this] { peers.Flush(); });
    loop.Every(50'000'000, [this] {
      peers.Tick();
      cache.Tick();
    });
    loop.Start();
    MutexLock lock(cluster.mutex);
    cluster.nodes[name] = this;
  }
  ~PeerNode() override {
    Leave();
    while (!OnLoop([this] { return peers.Stop(); })) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    OnLoop([this] {
      for (const storage::SessionId session : {kEngine, kOnGpu, kOther}) cache.CloseSession(session, [] {});
    });
    while (calls_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    transport = nullptr;  // ends everything in flight
    workers.Stop();
    loop.Stop();
  }

  static constexpr storage::SessionId kEngine = 1, kOnGpu = 2, kOther = 3;  // kOther is the session of the other tenant
  static std::vector<std::string> Tenants() { return {"default", "other"}; }
  static constexpr storage::Nanos kLongWait = 100'000'000'000;
  static PeersOptions All() {
    PeersOptions options;
    options.announce = AnnounceMode::kAll;
    options.lookup.deadline = 5'000'000'000;
    return options;
  }
  // For nodes with GPUs, because emulated ones are slow.
  static PeersOptions Patient() {
    PeersOptions options = All();
    options.lookup.deadline = options.objects.least_patience = options.objects.most_patience = kLongWait;
    return options;
  }

  // Disconnects the node: no node reaches it any more.
  void Leave() {
    MutexLock lock(cluster_.mutex);
    cluster_.nodes.erase(name_);
    std::erase_if(cluster_.announced,
                  [this](const TestCluster::Announced& one) { return one.member == directory.member; });
  }
  void Publish(const ObjectHeader& plan, uint64_t text) { Publish(kEngine, plan, storage::TestSource(plan, text)); }
  void Publish(storage::SessionId session, const ObjectHeader& plan, storage::PublishSource source) {
    std::promise<PublishOutcome> outcome;
    loop.PostCompletion(0, [&] {
      const auto reservation = cache.Reserve(session, plan);
      cache.Publish(session, reservation.id, std::move(source), [&](PublishOutcome o) { outcome.set_value(o); });
    });
    if (outcome.get_future().get() != PublishOutcome::kPublished) std::abort();
  }
  // Performs an engine's lookup: first on other nodes, then here.
  storage::Match Lookup(std::span<const storage::Query> queries, const storage::PrefixText* text = nullptr,
                        storage::SessionId session = kEngine) {
    const RemoteQuestion question{queries, text};
    std::promise<storage::Match> match;
    const storage::TenantId tenant = session == kOther ? 1 : 0;
    std::vector<storage::Query> asked(queries.begin(), queries.end());
    peers.lookup().Find(tenant, {&question, 1}, [&](RemoteLookup::Adopted adopted) {
      loop.PostCompletion(tenant, [&, adopted] {
        if (adopted != nullptr) adopted->Mark(asked);
        match.set_value(text == nullptr ? cache.Lookup(session, asked) : cache.Lookup(session, asked, *text, nullptr));
      });
    });
    return match.get_future().get();
  }
  std::vector<MissReason> Land(const storage::LeaseId& lease, storage::LandTarget target,
                               storage::SessionId session = kEngine) {
    std::promise<std::vector<MissReason>> verdict;
    loop.PostCompletion(0, [&] {
      cache.Land(
          session, ++landings_, lease, std::move(target),
          {.progress = [](uint32_t) {}, .done = [&](std::vector<MissReason> v) { verdict.set_value(std::move(v)); }});
    });
    return verdict.get_future().get();
  }
  void Release(const storage::LeaseId& lease, storage::SessionId session = kEngine) {
    OnLoop([&] { cache.Release(session, lease); });
  }

  // Calls to a node end with `status` from now on; OK ends that. `tenant`: only its calls; empty: all.
  void Refuse(const std::string& node, const absl::Status& status, const std::string& tenant = "") {
    MutexLock lock(cluster_.mutex);
    refused_[{node, tenant}] = status;
  }
  // Sets whether this node's configuration shares its tenants with that node.
  void Share(const std::string& node, bool shares) {
    MutexLock lock(cluster_.mutex);
    shares ? (void)withheld_.erase(node) : (void)withheld_.insert(node);
  }
  // Number of calls made, including refused ones.
  uint64_t made() const { return made_; }

  // PeerAsker: calls the other node directly. The calls only post to its loop, so the lock keeps it alive meanwhile.
  bool Shares(const Member& member, const std::string&) const override {
    MutexLock lock(cluster_.mutex);
    return !withheld_.contains(member.node);
  }
  void Open(const Member& member, const std::string& tenant, PeerOpen open,
            PeerCalls::Done<std::vector<PeerOpened>> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, tenant); !refused.ok()) return done(refused);
    other->peers.PeerHere(Self());  // it may greet repeatedly
    other->peers.Open(Self(), TenantOf(tenant), std::move(open), Counted(std::move(done)));
  }
  void Renew(const Member& member, PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, ""); !refused.ok()) return done(refused);
    other->peers.Renew(Self(), std::move(renew), Counted(std::move(done)));
  }
  void Offer(const Member& member, const std::string& tenant, PeerOffer offer,
             PeerCalls::Done<std::vector<TakeOutcome>> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, tenant); !refused.ok()) return done(refused);
    other->peers.Offer(Self(), TenantOf(tenant), std::move(offer), Counted(std::move(done)));
  }
  void Close(const Member& member, std::vector<PeerLease> leases, std::function<void(absl::Status)> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, ""); !refused.ok()) return done(refused);
    other->peers.Close(Self(), std::move(leases));
    done(absl::OkStatus());
  }

  void Workers(const Member& member, const std::string& tenant, const NamespaceId& ns,
               PeerCalls::Done<std::vector<PeerWorker>> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, tenant); !refused.ok()) return done(refused);
    other->peers.Workers(Self(), TenantOf(tenant), ns, Counted(std::move(done)));
  }
  void Prefill(const Member& member, const std::string& tenant, PeerPrefill prefill,
               PeerCalls::Done<PeerOpened> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, tenant); !refused.ok()) return done(refused);
    other->peers.PeerHere(Self());
    other->peers.Prefill(Self(), TenantOf(tenant), std::move(prefill), Counted(std::move(done)));
  }
  void Probe(const Member& member, const std::string& tenant, const PeerProbe& probe,
             PeerCalls::Done<v1::NodeProbe> done) override {
    MutexLock lock(cluster_.mutex);
    PeerNode* const other = NodeOf(member);
    if (other == nullptr) return done(absl::UnavailableError("the node cannot be reached"));
    if (const absl::Status refused = Refused(member, tenant); !refused.ok()) return done(refused);
    other->peers.Probe(Self(), TenantOf(tenant), probe, Counted(std::move(done)));
  }

 private:
  PeerHello Self() const { return {.node = name_}; }
  PeerNode* NodeOf(const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(cluster_.mutex) {
    const auto found = cluster_.nodes.find(member.node);
    const bool there =
        found != cluster_.nodes.end() && found->second->directory.member->incarnation == member.incarnation;
    return there ? found->second : nullptr;
  }
  static storage::TenantId TenantOf(const std::string& name) { return name == Tenants()[0] ? 0 : 1; }
  absl::Status Refused(const Member& member, const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(cluster_.mutex) {
    ++made_;
    for (const std::string& of : {std::string(), tenant}) {
      const auto found = refused_.find({member.node, of});
      if (found != refused_.end() && !found->second.ok()) return found->second;
    }
    return absl::OkStatus();
  }
  // Forwards the reply. This node lives until the reply has come, or the other node has dropped it.
  template <typename Reply>
  PeerCalls::Done<Reply> Counted(PeerCalls::Done<Reply> done) {
    ++calls_;
    const std::shared_ptr<void> call(nullptr, [this](void*) { --calls_; });
    return [call, done = std::move(done)](absl::StatusOr<Reply> reply) { done(std::move(reply)); };
  }
  static std::unique_ptr<storage::MemoryTier> MakeTier(TierKind kind, uint64_t extents, const kernels::Gpu* gpu) {
    const bool on_gpu = kind == TierKind::kHbm;
    if (on_gpu && gpu == nullptr) return nullptr;
    auto made = *storage::MemoryTier::Make({.kind = kind,
                                            .capacity_bytes = (on_gpu ? 1 : 2) * extents * limits::kExtentBytes,
                                            .arena_bytes = 8 * limits::kExtentBytes,
                                            .arena = {.gpu = gpu},
                                            .on_gpu = on_gpu,
                                            .first_arena = on_gpu || gpu == nullptr ? 0 : storage::kArenasApart});
    for (storage::TenantId tenant = 0; tenant < (on_gpu ? 1 : 2); ++tenant) {
      if (!made->AddTenant(tenant, extents * limits::kExtentBytes).ok()) std::abort();
    }
    return made;
  }
  storage::Tiers TiersOfNode() {
    storage::Tiers tiers{.remote = &peers.source()};
    if (hbm != nullptr) tiers.memory.push_back(hbm.get());
    tiers.common = tiers.memory.size();
    tiers.memory.push_back(tier.get());
    return tiers;
  }
  std::vector<storage::GpuLane*> Lanes() const {
    return lane == nullptr ? std::vector<storage::GpuLane*>() : std::vector<storage::GpuLane*>{lane.get()};
  }
  static TransportOptions OptionsOfTransport(RemoteReads reads, const kernels::Gpu* gpu) {
    TransportOptions options{.listen = {"127.0.0.1", 0}, .reads = reads};
    if (gpu == nullptr) return options;
    options.enter_gpu = [gpu] { gpu->Enter(); };
    options.silence = options.deadline = kLongWait;
    return options;
  }
  storage::CacheOptions Options() {
    storage::CacheOptions options;
    options.objects.residence = peers.residence();
    return options;
  }

  TestCluster& cluster_;
  const std::string name_;
  storage::LandingId landings_ = 0;
  std::atomic<int> calls_{0};  // calls in flight to other nodes
  std::atomic<uint64_t> made_{0};
  // The key is node and tenant.
  std::map<std::pair<std::string, std::string>, absl::Status> refused_ ABSL_GUARDED_BY(cluster_.mutex);
  std::set<std::string> withheld_ ABSL_GUARDED_BY(cluster_.mutex);

 public:
  MonotonicClock clock;
  EventLoop loop{1024, clock, 2};
  TestDirectory directory;
  std::unique_ptr<storage::MemoryTier> hbm, tier;  // hbm is null without a GPU
  std::unique_ptr<storage::GpuLane> lane;
  std::unique_ptr<Transport> transport;
  Peers peers;
  kernels::ThreadPool threads{1};
  WorkerPool workers{2, 1024, loop};
  storage::Mover mover;
  storage::CountingObserver observer;  // used by the loop
  storage::Cache cache;
};

inline std::vector<std::shared_ptr<const Member>> TestDirectory::Members() const {
  std::vector<std::shared_ptr<const Member>> members{member};
  MutexLock lock(cluster_.mutex);
  for (const auto& [name, node] : cluster_.nodes) {
    if (name != self_) members.push_back(node->directory.member);
  }
  return members;
}

inline bool TestDirectory::BeingErased(const std::string& tenant, const NamespaceId& ns) const {
  MutexLock lock(cluster_.mutex);
  int64_t everywhere = erased;
  for (const auto& [name, node] : cluster_.nodes) {
    everywhere = std::min<int64_t>(everywhere, node->directory.erased);
  }
  return std::ranges::any_of(cluster_.erasures, [&](const ClusterErasure& one) {
    return one.revision > everywhere && one.tenant == tenant && (!one.ns || *one.ns == ns);
  });
}

}  // namespace ashlar::daemon
