// SPDX-License-Identifier: Apache-2.0
#include "daemon/daemon.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/admin/admin_server.h"
#include "daemon/admin/admin_service.h"
#include "daemon/admin/audit_log.h"
#include "daemon/config/config.h"
#include "daemon/engine/engine_service.h"
#include "daemon/events/node_events.h"
#include "daemon/from_config.h"
#include "daemon/mappings.h"
#include "daemon/observe/http_endpoint.h"
#include "daemon/observe/metrics.h"
#include "daemon/open_files.h"
#include "daemon/peer/cluster.h"
#include "daemon/reloader.h"
#include "daemon/router/router.h"
#include "daemon/rpc/disk_health.h"
#include "daemon/rpc/rpc_server.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/refused_connections.h"
#include "daemon/runtime/worker_pool.h"
#include "daemon/session/hosted_memory.h"
#include "daemon/session/model_registry.h"
#include "daemon/session/session_server.h"
#include "daemon/session/session_table.h"
#include "daemon/threads.h"
#include "daemon/tiers/gpus.h"
#include "daemon/tiers/tier_set.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/mutex.h"
#include "storage/cache.h"
#include "storage/transfer/mover.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kSecond = 1'000'000'000;
constexpr storage::Nanos kSweepHosted = kSecond / 4;  // longest time that memory without a holder stays charged
constexpr storage::Nanos kLevelsEvery = kSecond / 5;
constexpr storage::Nanos kScrubEvery = kSecond / 50;
constexpr storage::Nanos kStandstill =
    10 * kSecond;  // longest silence of the metadata thread before /healthz replies 503

// The threads that own data. They outlive all that post to them.
struct Loops {
  Loops(size_t depth, size_t tenants) : mappings(depth, clock, tenants), loop(depth, clock, tenants) {}
  MonotonicClock clock;
  EventLoop mappings;  // outlives all regions
  EventLoop loop;
};

storage::Tiers TiersOf(const TierSet& tiers, Cluster* cluster) {
  storage::Tiers all = tiers.tiers();
  if (cluster != nullptr) all.remote = &cluster->source();
  return all;
}

ModelRegistry::Events FollowModels(Cluster* cluster) {
  if (cluster == nullptr) return {};
  return {.remembered = [cluster](const NamespaceId& ns) { cluster->Follow(ns); },
          .erased = [cluster](const NamespaceId& ns) { cluster->Unfollow(ns); }};
}

std::vector<SessionServices::Seat> SeatsOf(const Gpus& gpus, const TierSet& tiers) {
  std::vector<SessionServices::Seat> seats;
  for (const kernels::Gpu* gpu : gpus.all()) seats.push_back({gpu, tiers.LevelOf(*gpu)});
  return seats;
}

// Returns null if no cluster is configured.
absl::StatusOr<std::unique_ptr<Cluster>> MakeCluster(const v1::Config& config, Loops& loops, const Gpus& gpus,
                                                     storage::Executor* disk_io) {
  if (!config.has_cluster()) return nullptr;
  const std::vector<const kernels::Gpu*> all = gpus.all();
  const kernels::Gpu* const gpu = all.empty() || config.hbm().empty() ? nullptr : all.front();
  return Cluster::Make(config, loops.loop, loops.mappings, loops.clock, gpu, disk_io);
}

}  // namespace

// In the order of construction; destroyed in the opposite order, so each member outlives its users.
struct Daemon::Impl {
  Impl(const v1::Config& config, const std::string& file, std::unique_ptr<AuditLog> its_audit,
       std::unique_ptr<Loops> its_loops, std::unique_ptr<TierSet> its_tiers, Gpus its_gpus,
       std::unique_ptr<Cluster> its_cluster)
      : tenants(config.tenants_size()),
        audit(std::move(its_audit)),
        metrics(TenantNames(config)),
        loops(std::move(its_loops)),
        tiers(std::move(its_tiers)),
        gpus(std::move(its_gpus)),
        cluster(std::move(its_cluster)),
        threads(static_cast<int>(config.workers().threads())),
        workers(kMovingThreads, ShareOf(config.workers().queue_depth(), config), loop,
                std::min(config.tenants_size() - 1, kMostSpareThreads)),
        mover(kernels::Host(), threads, workers, tiers->common(), storage::kTurnBytes, gpus.lanes()),
        cache(OptionsFrom(config, events.Reporter(cluster == nullptr ? nullptr : cluster->residence())),
              TiersOf(*tiers, cluster.get()), mover, workers, loops->clock, &metrics),
        table(cache, loop),
        services{loop,
                 mappings,
                 hosted,
                 table,
                 tiers->mapped(),
                 TenantsByUid(config),
                 config.sessions().region_bytes(),
                 config.sessions().max_regions(),
                 SeatsOf(gpus, *tiers),
                 refused},
        models(FollowModels(cluster.get())),
        router(loops->clock, cache, Router::Options::From(config)),
        engine_service(
            cache, metrics, loop, table, models, router, cluster == nullptr ? nullptr : &cluster->lookup(),
            config.events().zmq_address().empty() ? nullptr : &events.texts(),
            cluster == nullptr ? std::function<PromptHandoff&()>()
                               : [this]() -> PromptHandoff& { return cluster->handoff(); }),
        admin_service({cache, loop, table, models, metrics, loops->clock, TenantNames(config),
                       [this] { return Measure(); }, [this](bool draining) { return SetDraining(draining); },
                       [this] { return static_cast<double>(reloader.drain_seconds()); }, router,
                       [this] { return reloader.config() + (cluster == nullptr ? "" : cluster->DescribeTransport()); },
                       config.cluster().node(), events.hub(),
                       [this](auto tenant, const auto& ns) { engine_service.EraseTextsAndPages(tenant, ns); },
                       [this](bool dry_run) { return reloader.Reload(dry_run); }, cluster.get()}),
        reloader(config, file, loop, *tiers, cache, services, engine_service.call_rates(), metrics, *audit) {
    if (cluster != nullptr) {
      cluster->Attach(cache, tiers->memory(), router,
                      [this](auto tenant, const auto& ns) { engine_service.EraseTextsAndPages(tenant, ns); });
    }
    tiers->Configure(config, cache);
    SetCallRates(config, &engine_service.call_rates());
    cache.upkeep().scrubber().SetRate(config.scrub().bytes_per_second());
    router.probes().Attach(&engine_service);
    router.RunOn(loop);
  }

  Levels Measure() {
    Levels levels;
    const auto measure = [&](TierKind kind, const storage::Tier* tier) {
      for (int i = 0; tier != nullptr && i < tenants; ++i) {
        levels.tiers[kind].push_back(tier->Usage(static_cast<storage::TenantId>(i)));
      }
    };
    for (const auto& hbm : tiers->hbm()) {
      std::vector<storage::TierUsage>& all = levels.tiers[TierKind::kHbm];
      all.resize(static_cast<size_t>(tenants));
      for (int i = 0; i < tenants; ++i) all[i] += hbm->Usage(static_cast<storage::TenantId>(i));
    }
    measure(TierKind::kDram, &tiers->dram());
    measure(TierKind::kSsd, tiers->ssd());
    if (tiers->ssd() != nullptr && tiers->ssd()->health().degraded()) {
      levels.degraded[TierKind::kSsd] = std::string(tiers->ssd()->health().status().message());
    }
    levels.quarantined = tiers->quarantined();
    const storage::Cache::Stats stats = cache.stats();
    levels.pools = stats.pools;
    levels.objects = stats.objects;
    levels.object_bytes = stats.object_bytes;
    levels.leases = stats.leases;
    levels.reservations = stats.reservations;
    levels.landings = stats.landings;
    levels.compositions = stats.compositions;
    levels.sessions = table.size();
    levels.draining = cache.offers().draining();
    levels.writing_behind = stats.memory_only.writing;
    levels.memory_only_objects = stats.memory_only.objects;
    levels.memory_only_bytes = stats.memory_only.bytes;
    levels.holdings.resize(tenants);
    for (const auto& [uid, user] : services.tenant_of_uid) {
      levels.holdings[user.id] = {.region_bytes = user.regions.bytes->taken(),
                                  .regions = user.regions.number->taken(),
                                  .max_regions = user.regions.number->limit(),
                                  .model_bytes = user.models->taken(),
                                  .max_model_bytes = user.models->limit(),
                                  .unsent_descriptors = *user.unsent};
    }
    for (int i = 0; i < tenants; ++i) {
      const auto tenant = static_cast<storage::TenantId>(i);
      levels.pages.push_back(engine_service.PageLevels(tenant));
      levels.prefixes.push_back(cache.prefixes().stats(tenant));
      levels.holdings[i].beyond_calls_per_second = engine_service.call_rates().refused(tenant);
      levels.holdings[i].beyond_bytes_per_second = cache.byte_rates().refused(tenant);
    }
    levels.scrub = cache.upkeep().scrubber().totals();
    levels.metadata_queue = loop.depth();
    levels.worker_queue = workers.depth();
    levels.disk_queue = tiers->disk_queue();
    levels.copies_under_way = stats.copies_under_way;
    levels.metadata_queue_rejections = loop.rejected();
    levels.worker_queue_rejections = workers.rejected();
    const LogCounts lines = CountLogLines();
    levels.log_lines_dropped = lines.dropped;
    levels.log_lines_suppressed = lines.suppressed;
    levels.refused_connections = refused.counts();
    if (cluster != nullptr) levels.cluster = cluster->figures();
    levels.router = router.figures();
    return levels;
  }

  // Updates the values that other threads read.
  void Watch() {
    const Levels levels = Measure();
    metrics.Set(levels);
    SummarizeSuppressedLines();
    if (tiers->ssd() != nullptr) {
      const auto found = levels.degraded.find(TierKind::kSsd);
      disk_health.Report(found == levels.degraded.end() ? "" : found->second, rpc_server.get());
    }
    measured_at = loops->clock.Now();
    if (levels.cluster.rdma_fallback && !rdma_fallback) {
      Log(LogLevel::kError, absl::StrCat(kRdmaFallback, "; this node is not ready"), {});
    }
    rdma_fallback = levels.cluster.rdma_fallback;
    uint64_t to_come = 0;
    for (const auto& [kind, usages] : levels.tiers) {
      if (kind == TierKind::kSsd || (kind == TierKind::kHbm && tiers->hbm()[0]->gpu() != nullptr)) continue;
      for (const storage::TierUsage& usage : usages) to_come += usage.capacity_bytes - usage.held_bytes;
    }
    services.memory_to_come = to_come;
  }

  void StartLoops() {
    loop.Every(kSecond, [this](storage::Slice& slice) {
      measured_at = loops->clock.Now();  // set after the work: a long tick is not a standstill
      return cache.Tick(slice);
    });
    Watch();
    loop.Every(kSecond, [this] { tiers->Tick(cache); });
    loop.Every(kScrubEvery, [this] { cache.upkeep().scrubber().Tick(); });
    mappings.Every(kSweepHosted, [this] { hosted.Sweep(); });
    loop.Start();
    mappings.Start("mappings");
    looping = true;
  }

  // Starts engines' sockets first and the probes' last. After an error, started servers run until Stop.
  absl::Status StartServing(const v1::Config& config) {
    if (absl::Status status = StartSockets(config); !status.ok()) return status;
    if (cluster != nullptr) {
      if (absl::Status status = cluster->Serve(); !status.ok()) return status;
    }
    if (absl::Status status = events.Publish(config.events(), refused); !status.ok()) return status;
    ready = true;
    absl::StatusOr<std::unique_ptr<HttpEndpoint>> started_http = StartHttp(config);
    if (!started_http.ok()) return started_http.status();
    http = *std::move(started_http);
    if (http != nullptr) metrics_port = http->port();
    started = true;
    return absl::OkStatus();
  }

  absl::Status StartSockets(const v1::Config& config) {
    const v1::Listen& listen = config.listen();
    RpcListener::Options connections{.of_a_user = RpcListener::kOfASession * size_t{config.sessions().max_sessions()}};
    for (const auto& [uid, user] : services.tenant_of_uid) connections.tenant_of_uid[uid] = user.id;
    auto rpc = RpcServer::Start(listen.rpc_socket(), std::move(connections), engine_service, metrics, refused);
    if (!rpc.ok()) return rpc.status();
    rpc_server = *std::move(rpc);
    loop.Every(kLevelsEvery, [this] {
      Watch();
      metrics.TurnsTaken(loop.TakeTurnTimes());
    });
    loop.PostCompletion(storage::kNoTenant, [this] { Watch(); });
    auto session = SessionServer::Start(listen.session_socket(), config.sessions().max_sessions(), services);
    if (!session.ok()) return session.status();
    session_server = *std::move(session);
    if (listen.admin_socket().empty()) return absl::OkStatus();
    auto admin = AdminServer::Start(listen.admin_socket(), admin_service, *audit, refused);
    if (!admin.ok()) return admin.status();
    admin_server = *std::move(admin);
    return absl::OkStatus();
  }

  void LogStarted(const v1::Config& config) const {
    const v1::Listen& listen = config.listen();
    Log(LogLevel::kInfo, "daemon started",
        {{"rpc_socket", listen.rpc_socket()},
         {"session_socket", listen.session_socket()},
         {"admin_socket", listen.admin_socket()},
         {"metrics_port", metrics_port},
         {"metrics_socket", listen.metrics_socket()},
         {"kernels", std::string(kernels::Host().name())},
         {"threads", threads.Size()},
         {"gpu", DevicesOf(config)},
         {"hbm_bytes", HbmBytes(config)},
         {"dram_bytes", config.dram().capacity_bytes()},
         {"ssd_bytes", config.ssd().capacity_bytes()},
         {"node", config.cluster().node()},
         {"tenants", tenants}});
  }

  // Returns null if no HTTP is configured.
  absl::StatusOr<std::unique_ptr<HttpEndpoint>> StartHttp(const v1::Config& config) const {
    return HttpEndpoint::Start(
        config, metrics,
        {.alive = [this] { return loops->clock.Now() - measured_at <= kStandstill; },
         .unready = [this] { return !ready          ? "draining"
                                    : rdma_fallback ? kRdmaFallback
                                                    : ""; }});
  }

  // Any thread, while all servers exist. Returns false if the daemon is stopping; then it stays draining.
  bool SetDraining(bool draining) {
    MutexLock lock(drain_mutex);
    if (!draining && stopping) return false;
    ready = !draining;
    rpc_server->SetServing(!draining);
    session_server->SetAdmitting(!draining);
    loop.PostCompletion(storage::kNoTenant, [this, draining] {
      draining ? cache.offers().StartDrain() : cache.offers().EndDrain();
      if (cluster != nullptr) cluster->SetDraining(draining);
    });
    return true;
  }

  void StartStopping() {
    MutexLock lock(drain_mutex);
    stopping = true;
  }

  Levels MeasureOnLoop() {
    std::promise<Levels> levels;
    loop.PostCompletion(storage::kNoTenant, [&] { levels.set_value(Measure()); });
    return levels.get_future().get();
  }

  Mutex drain_mutex;
  bool stopping ABSL_GUARDED_BY(drain_mutex) = false;
  DiskHealth disk_health;  // used only on the loop
  const int tenants;
  const std::unique_ptr<AuditLog> audit;
  Metrics metrics;
  RefusedConnections refused;
  HostedMemory hosted;
  NodeEvents events;
  const std::unique_ptr<Loops> loops;
  EventLoop &mappings = loops->mappings, &loop = loops->loop;
  const std::unique_ptr<TierSet> tiers;
  const Gpus gpus;
  const std::unique_ptr<Cluster> cluster;  // null without a cluster
  kernels::ThreadPool threads;             // shared by the workers' jobs
  WorkerPool workers;
  storage::Mover mover;
  storage::Cache cache;
  SessionTable table;
  SessionServices services;
  ModelRegistry models;
  Router router;
  EngineService engine_service;
  AdminService admin_service;
  Reloader reloader;
  std::unique_ptr<RpcServer> rpc_server;
  std::unique_ptr<AdminServer> admin_server;
  std::unique_ptr<SessionServer> session_server;
  std::atomic<storage::Nanos> measured_at{loops->clock.Now()};  // last run of the metadata thread's timers
  std::atomic<bool> ready{false}, rdma_fallback{false};
  uint16_t metrics_port = 0;
  std::unique_ptr<HttpEndpoint> http;  // null if not configured
  bool looping = false;                // the loops are running
  bool started = false;
  bool stopped = false;
  bool disk_hangs = false;  // set at the stop
};

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const v1::Config& config, const std::string& file) {
  if (absl::Status status = RaiseOpenFilesLimit(config); !status.ok()) return status;
  if (absl::Status status = CheckMappings(config); !status.ok()) return status;
  auto audit = AuditLog::Open(config.log().audit_file());
  if (!audit.ok()) return audit.status();
  auto loops = std::make_unique<Loops>(config.workers().queue_depth(), config.tenants_size());
  absl::StatusOr<Gpus> gpus = Gpus::Open(config, kMovingThreads);
  if (!gpus.ok()) return gpus.status();
  absl::StatusOr<std::unique_ptr<TierSet>> tiers = TierSet::Make(config, loops->loop, gpus->all());
  if (!tiers.ok()) return tiers.status();
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = MakeCluster(config, *loops, *gpus, (*tiers)->disk_io());
  if (!cluster.ok()) return cluster.status();
  auto impl = std::make_unique<Impl>(config, file, *std::move(audit), std::move(loops), *std::move(tiers),
                                     *std::move(gpus), *std::move(cluster));
  Impl& parts = *impl;
  // From now on the destructor stops everything that has started.
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(impl)));
  parts.StartLoops();
  if (absl::Status status = parts.StartServing(config); !status.ok()) return status;
  parts.LogStarted(config);
  return daemon;
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Daemon::~Daemon() {
  if (!Stop(0)) static_cast<void>(impl_.release());
}

void Daemon::Reload(const Operator& by) {
  const auto changes = impl_->reloader.Reload(false);
  std::string outcome(changes.status().message());
  if (changes.ok()) outcome = absl::StrCat("ok changes=", changes->size());
  if (changes.ok() && !changes->empty()) absl::StrAppend(&outcome, " fields=", FieldsOf(*changes));
  impl_->audit->Write({.by = by, .action = "Reload", .request = "signal=SIGHUP", .outcome = outcome});
}

storage::Nanos Daemon::drain_time() const {
  return storage::Nanos{impl_->reloader.drain_seconds()} * kSecond;
}

int Daemon::metrics_port() const {
  return impl_->metrics_port;
}

bool Daemon::Drain(storage::Nanos grace, const std::function<bool()>& interrupted) {
  const storage::Nanos deadline = impl_->loops->clock.Now() + grace;
  impl_->StartStopping();
  impl_->SetDraining(true);
  Levels left = impl_->MeasureOnLoop();
  bool ended = false;
  while (!left.drained() && impl_->loops->clock.Now() < deadline && !ended) {
    ended = interrupted();
    left = impl_->MeasureOnLoop();
  }
  Log(left.drained() ? LogLevel::kInfo : LogLevel::kWarning, left.drained() ? "drained" : "drain timed out",
      {{"leases", left.leases},
       {"requests", left.admissions()},
       {"landings", left.landings},
       {"lost_objects", left.memory_only_objects},
       {"lost_bytes", left.memory_only_bytes}});
  return !ended;
}

bool Daemon::Stop(storage::Nanos grace) {
  if (impl_->stopped) return !impl_->disk_hangs;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(grace);
  impl_->stopped = true;
  impl_->ready = false;
  impl_->admin_server = nullptr;  // stopped while the loop still runs
  if (impl_->session_server != nullptr) impl_->session_server->StopAccepting();
  if (impl_->looping) impl_->router.StopOn(impl_->loop);  // wakes engines that wait in prefill calls
  if (impl_->rpc_server != nullptr) impl_->rpc_server->Stop(grace);
  impl_->session_server = nullptr;  // ends every session: transfers in flight are cancelled
  if (impl_->cluster != nullptr && impl_->looping) impl_->cluster->Leave();
  impl_->workers.Stop();  // waits for the cancelled transfers
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(end - std::chrono::steady_clock::now());
  impl_->disk_hangs = !impl_->tiers->StopDisk(std::max(left, std::chrono::nanoseconds(kDiskPatience)));
  impl_->loop.Stop();      // runs their completions and drains sessions
  impl_->mappings.Stop();  // unmaps their memory
  impl_->http = nullptr;
  if (!impl_->disk_hangs) impl_->tiers->CloseDisk();
  if (impl_->started) Log(LogLevel::kInfo, "daemon stopped");
  return !impl_->disk_hangs;
}

}  // namespace ashlar::daemon
