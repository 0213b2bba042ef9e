// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/cluster.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/peer/channels/peer_channels.h"
#include "daemon/peer/control/peer_server.h"
#include "daemon/peer/directory/etcd_directory.h"
#include "daemon/peer/erase/acknowledgements.h"
#include "daemon/peer/erase/eraser.h"
#include "daemon/runtime/log.h"
#include "daemon/security/peer_policy.h"
#include "daemon/security/tls.h"
#include "proto/version.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;
constexpr storage::Nanos kFlushEvery = 5 * kMillisecond;

PeerHello SelfOf(const v1::Cluster& cluster) {
  PeerHello self{.node = cluster.node(), .transport_address = cluster.transport_address()};
  std::random_device random;
  for (uint8_t& byte : self.incarnation) byte = static_cast<uint8_t>(random());
  return self;
}

EtcdDirectoryOptions DirectoryOptions(const v1::Cluster& cluster) {
  const v1::Etcd& etcd = cluster.etcd();
  return {.endpoints = {etcd.endpoints().begin(), etcd.endpoints().end()},
          .ca_file = etcd.ca_file(),
          .cert_file = etcd.cert_file(),
          .key_file = etcd.key_file(),
          .user = etcd.user(),
          .password_file = etcd.password_file(),
          .prefix = etcd.prefix(),
          .cluster = cluster.name(),
          .lease_seconds = etcd.lease_seconds(),
          .writes_per_second = etcd.writes_per_second(),
          .cluster_writes_per_second = etcd.cluster_writes_per_second(),
          .queued_writes = etcd.queued_writes(),
          .mirror_entries = etcd.mirror_entries()};
}

// GPUs by their numbers in the configuration, which the operator knows.
std::vector<std::optional<uint8_t>> GpusOfTiers(const v1::Config& config) {
  std::vector<std::optional<uint8_t>> gpus;
  for (const v1::Hbm& tier : config.hbm()) {
    const bool fits = tier.has_device() && tier.device() < Holding::kMostGpus;
    gpus.push_back(fits ? std::optional(static_cast<uint8_t>(tier.device())) : std::nullopt);
  }
  return gpus;
}

PeersOptions OptionsOf(const v1::Config& config) {
  const v1::Cluster& cluster = config.cluster();
  PeersOptions options;
  options.gpus = GpusOfTiers(config);
  options.self = cluster.node();
  options.lookup.deadline = cluster.lookup_milliseconds() * kMillisecond;
  options.replicas.bytes_per_second = cluster.replicate() == "hot" ? cluster.replica_bytes() : 0;
  options.announce = cluster.announce() == "all" ? AnnounceMode::kAll : AnnounceMode::kUsedTwice;
  return options;
}

std::vector<std::string> NamesOf(const v1::Config& config) {
  std::vector<std::string> names;
  for (const v1::Tenant& tenant : config.tenants()) names.push_back(tenant.name());
  return names;
}

absl::StatusOr<std::unique_ptr<Transport>> StartTransport(const v1::Cluster& cluster, const kernels::Gpu* gpu) {
  absl::StatusOr<HostPort> listen = ParseHostPort(cluster.transport_address());
  if (!listen.ok()) return listen.status();
  TransportOptions options;
  options.listen = *std::move(listen);
  options.expect_rdma = cluster.expect_transport() == "rdma";
  options.reads = cluster.rdma_reads() == "off" ? RemoteReads::kNever : RemoteReads::kByCards;
  options.allow = {cluster.transport_allow().begin(), cluster.transport_allow().end()};
  if (gpu != nullptr) options.enter_gpu = [gpu] { gpu->Enter(); };
  options.log = [](const std::string& event, const std::string& peer, const std::string& detail) {
    Log(event == kProtocolViolation ? LogLevel::kWarning : LogLevel::kInfo, event,
        {{"peer", peer}, {"detail", detail}});
  };
  return Transport::Start(std::move(options));
}

// Decides which nodes may be peers. Constructed first, because it may refuse the configuration.
struct Trusted {
  explicit Trusted(const v1::Config& config) : policy(config) {}

  Refusals refusals;
  const PeerPolicy policy;
  std::unique_ptr<Tls> tls;  // null: every node is accepted
};

absl::StatusOr<std::unique_ptr<Trusted>> MakeTrusted(const v1::Config& config) {
  auto trusted = std::make_unique<Trusted>(config);
  const v1::PeerTls& files = config.cluster().tls();
  if (files.insecure()) return trusted;
  absl::StatusOr<std::unique_ptr<Tls>> tls = Tls::Open(
      {.node = config.cluster().node(),
       .ca_file = files.ca_file(),
       .cert_file = files.cert_file(),
       .key_file = files.key_file(),
       .spiffe_prefix = files.spiffe_prefix(),
       .check_every = files.reload_seconds() * kSecond},
      [policy = &trusted->policy](const std::string& node) { return policy->Member(node); }, trusted->refusals);
  if (!tls.ok()) return tls.status();
  trusted->tls = *std::move(tls);
  return trusted;
}

}  // namespace

// In the order of construction.
struct Cluster::Impl {
  Impl(const v1::Config& config, EventLoop& its_loop, EventLoop& its_slow, const storage::Clock& its_clock,
       storage::Executor* disk_io, std::unique_ptr<Trusted> its_trusted, std::unique_ptr<Transport> its_transport)
      : options(config.cluster()),
        loop(its_loop),
        slow(its_slow),
        clock(its_clock),
        trusted(std::move(its_trusted)),
        self(SelfOf(options)),
        transport(std::move(its_transport)),
        channels(self, options.peer_timeout_seconds() * kSecond, trusted->tls.get(), trusted->policy, trusted->refusals,
                 [this](const Member& member) { Lost(member); }),
        directory(DirectoryOptions(options),
                  {.node = options.node(),
                   .control_address = options.control_address(),
                   .transport_address = options.transport_address(),
                   .version = Version()},
                  Events(), clock),
        peers(loop, clock, NamesOf(config), directory, *transport, channels, channels, OptionsOf(config)),
        eraser(disk_io, clock, directory, NamesOf(config), disk_io != nullptr ? config.ssd().folder() : ""),
        acknowledgements(directory, clock) {}
  ~Impl() {
    server = nullptr;
    transport = nullptr;  // destroyed first, because it calls the other members
  }

  // Called on the directory's thread, possibly before all members exist; the loops run posted closures later.
  DirectoryEvents Events() {
    return {.members_changed = [this] { slow.PostCompletion(storage::kNoTenant, [this] { MembersChanged(); }); },
            .announce_again = [this] { loop.PostCompletion(storage::kNoTenant, [this] { peers.AnnounceAgain(); }); },
            .erasures_changed = [this] { loop.PostCompletion(storage::kNoTenant, [this] { eraser.Changed(); }); },
            .health_changed =
                [](const DirectoryHealth& health) {
                  Log(health.connected ? LogLevel::kInfo : LogLevel::kWarning,
                      health.connected ? "directory connected" : "directory not reachable; using known entries",
                      {{"reason", health.reason}});
                }};
  }
  void MembersChanged() {
    if (!left) channels.Update(directory.Members());
  }
  void Lost(const Member& member) {
    Log(LogLevel::kInfo, "peer left", {{"node", member.node}});
    loop.PostCompletion(storage::kNoTenant, [this, member] { peers.Lost(member); });
  }
  // The statistics wait for the transport's thread, so they are refreshed rarely.
  const TransportStats& Transported() {
    if (const storage::Nanos now = clock.Now(); now - transported_at >= kSecond) {
      transported_at = now;
      transported = transport->stats();
    }
    return transported;
  }

  const v1::Cluster options;
  EventLoop &loop, &slow;
  const storage::Clock& clock;
  const std::unique_ptr<Trusted> trusted;
  const PeerHello self;
  std::unique_ptr<Transport> transport;
  PeerChannels channels;
  EtcdDirectory directory;
  Peers peers;
  Eraser eraser;
  Acknowledgements acknowledgements;
  std::unique_ptr<PeerServer> server;
  bool left = false;  // slow loop only
  TransportStats transported;
  storage::Nanos transported_at = 0;
};

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Make(const v1::Config& config, EventLoop& loop, EventLoop& slow,
                                                       const storage::Clock& clock, const kernels::Gpu* gpu,
                                                       storage::Executor* disk_io) {
  absl::StatusOr<std::unique_ptr<Trusted>> trusted = MakeTrusted(config);
  if (!trusted.ok()) return trusted.status();
  absl::StatusOr<std::unique_ptr<Transport>> transport = StartTransport(config.cluster(), gpu);
  if (!transport.ok()) return transport.status();
  auto impl = std::make_unique<Impl>(config, loop, slow, clock, disk_io, *std::move(trusted), *std::move(transport));
  return std::unique_ptr<Cluster>(new Cluster(std::move(impl)));
}

Cluster::Cluster(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Cluster::~Cluster() = default;

storage::RemoteSource& Cluster::source() {
  return impl_->peers.source();
}

storage::ReportResidence Cluster::residence() {
  return impl_->peers.residence();
}

std::string Cluster::DescribeTransport() const {
  const char* const path = impl_->transport->reads() ? "rma: network cards read it from the holder" : "am: messages";
  const char* const gpus = impl_->transport->Reaches(MemoryType::kCuda) ? "directly" : "through dram";
  std::string lines = absl::StrCat("# Transport of fetched objects: ", path, "\n# Transfers from and to GPUs: ", gpus,
                                   "\n# Effective UCX settings:\n");
  for (const UcxSetting& setting : impl_->transport->settings()) {
    absl::StrAppend(&lines, "# ", setting.name, "=", setting.value, " (", setting.from, ")\n");
  }
  return lines;
}

std::vector<Located> Cluster::Locate(const NamespaceId& ns, std::span<const Key> keys) const {
  return impl_->directory.Locate(ns, keys);
}

std::set<std::string> Cluster::Unreachable() const {
  return impl_->peers.Unreachable();
}

RemoteLookup& Cluster::lookup() {
  return impl_->peers.lookup();
}

PromptHandoff& Cluster::handoff() {
  return impl_->peers.handoff();
}

void Cluster::Attach(storage::Cache& cache, const std::vector<storage::MemoryTier*>& tiers, Router& router,
                     std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages) {
  for (storage::MemoryTier* tier : tiers) Holder::RegisterArenas(*impl_->transport, *tier);
  impl_->peers.Start(cache, {tiers.begin(), tiers.end()});
  impl_->eraser.Start(cache, std::move(erase_texts_and_pages));
  impl_->peers.Route(router);
  impl_->loop.Every(kFlushEvery, [this] {
    impl_->peers.Flush();
    impl_->eraser.Tick();
  });
  impl_->loop.Every(kSecond, [this] { impl_->peers.Tick(); });
}

absl::Status Cluster::Serve() {
  absl::StatusOr<HostPort> listen = ParseHostPort(impl_->options.listen_address());
  if (!listen.ok()) return listen.status();
  absl::StatusOr<std::unique_ptr<PeerServer>> server = PeerServer::Start(
      {.listen = *std::move(listen), .self = impl_->self, .timeout = impl_->options.peer_timeout_seconds() * kSecond},
      impl_->trusted->tls.get(), impl_->trusted->policy, impl_->peers, impl_->trusted->refusals);
  if (!server.ok()) return server.status();
  impl_->server = *std::move(server);
  return absl::OkStatus();
}

void Cluster::Follow(const NamespaceId& ns) {
  impl_->directory.Follow(ns);
}

void Cluster::Unfollow(const NamespaceId& ns) {
  impl_->directory.Unfollow(ns);
}

ClusterErasure::Id Cluster::Erase(const std::string& tenant, const std::optional<NamespaceId>& ns,
                                  std::function<void(const absl::Status&)> done) {
  ClusterErasure erasure{.tenant = tenant, .ns = ns, .node = impl_->options.node()};
  std::random_device random;
  for (uint8_t& byte : erasure.id) byte = static_cast<uint8_t>(random());
  impl_->directory.Erase(erasure, std::move(done));
  return erasure.id;
}

std::optional<Cluster::ErasureState> Cluster::erasure(const ClusterErasure::Id& id) const {
  const std::vector<ClusterErasure> known = impl_->directory.Erasures();
  const auto found = std::ranges::find(known, id, &ClusterErasure::id);
  if (found == known.end()) return std::nullopt;
  ErasureState state;
  for (const auto& member : impl_->directory.Members()) {
    state.nodes.emplace_back(member->node, member->erased >= found->revision);
  }
  if (const storage::Erasure::Progress* here = impl_->eraser.Find(id)) state.here = *here;
  return state;
}

void Cluster::SetDraining(bool draining) {
  impl_->peers.SetDraining(draining);
}

ClusterFigures Cluster::figures() const {
  const PeersStats peers = impl_->peers.stats();
  const DirectoryStats directory = impl_->directory.Stats();
  const CertificateTerm certificate = impl_->trusted->tls == nullptr ? CertificateTerm() : impl_->trusted->tls->term();
  const TransportStats& transport = impl_->Transported();
  const Acknowledgements::Waiting erasures = impl_->acknowledgements.Look();
  ClusterFigures figures{.members = directory.members,
                         .peers_connected = impl_->channels.connected(),
                         .directory_connected = impl_->directory.Health().connected,
                         .directory_entries = directory.entries,
                         .directory_bytes = directory.bytes,
                         .directory_queued = directory.queued_announcements + directory.queued_withdrawals,
                         .directory_dropped = directory.dropped_announcements + directory.dropped_withdrawals,
                         .directory_resyncs = directory.resyncs,
                         .erasures_here = erasures.here,
                         .erasures_elsewhere = erasures.elsewhere,
                         .opened = peers.lookup.opened,
                         .missed = peers.lookup.missed,
                         .failed = peers.lookup.failed,
                         .joined = peers.lookup.joined,
                         .late = peers.lookup.late,
                         .fetched_bytes = peers.objects.bytes,
                         .failed_pieces = peers.objects.failed_pieces,
                         .moved = peers.objects.moved,
                         .hedges_won = peers.objects.hedges_won,
                         .hedges_lost = peers.objects.hedged - peers.objects.hedges_won,
                         .transferring = impl_->peers.transferring(),
                         .offered_bytes = peers.drained.bytes + peers.replicated.bytes + peers.handed_off.bytes,
                         .taken_bytes = peers.offered.bytes,
                         .peer_readers = peers.holder.nodes,
                         .peer_leases = peers.holder.leases,
                         .bytes_sent = transport.bytes_sent,
                         .bytes_received = transport.bytes_received,
                         .transport_grants = transport.grants,
                         .transport_transfers = transport.transfers,
                         .transport_loans = transport.loans,
                         .transport_refused = transport.refused,
                         .transport_malformed = transport.malformed,
                         .read_bytes = transport.read_bytes,
                         .registered_bytes = transport.registered_bytes,
                         .rdma_fallback = transport.rdma_fallback,
                         .certificate_expiry = certificate.ends,
                         .certificate_seconds = certificate.seconds,
                         .etcd_certificate_expiry = directory.certificate_expiry,
                         .etcd_certificate_seconds = directory.certificate_seconds};
  figures.peers = impl_->peers.PerNode(transport, PeerChannels::kMostPeers,
                                       [this](const Member& member) { return impl_->channels.Connected(member); });
  const auto add = [&](const char* reason, const OfferCounts& counts) {
    for (const auto& [outcome, count] : counts) figures.offers.push_back({reason, std::string(Name(outcome)), count});
  };
  add("drain", peers.drained.outcomes);
  add("replication", peers.replicated.outcomes);
  add("handoff", peers.handed_off.outcomes);
  add("received", peers.offered.outcomes);
  for (const PeerStats& peer : transport.peers) {
    if (!peer.connected || peer.accepted) continue;
    ++(peer.path == "rma" ? figures.peers_by_rma : figures.peers_by_am);
  }
  for (size_t i = 0; i < kRefusals; ++i) {
    const auto refusal = static_cast<Refusal>(i);
    figures.refusals.emplace_back(Name(refusal), impl_->trusted->refusals.count(refusal));
  }
  return figures;
}

void Cluster::Leave() {
  // The server's end waits for all replies, including those to offers.
  std::promise<void> answered;
  impl_->loop.PostCompletion(storage::kNoTenant, [&] {
    impl_->peers.EndOffers();
    answered.set_value();
  });
  answered.get_future().wait();
  impl_->server = nullptr;
  std::promise<void> ended;
  impl_->slow.PostCompletion(storage::kNoTenant, [&] {
    impl_->left = true;
    impl_->channels.Update({});
    ended.set_value();
  });
  ended.get_future().wait();
  // Waits for reads and sends in flight, which end soon. None may outlive its memory.
  for (bool idle = false; !idle;) {
    std::promise<bool> asked;
    impl_->loop.PostCompletion(storage::kNoTenant, [&] { asked.set_value(impl_->peers.Stop()); });
    idle = asked.get_future().get();
    if (!idle) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ashlar::daemon
