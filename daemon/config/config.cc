// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/config.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/cluster_config.h"
#include "daemon/config/gpu_config.h"
#include "daemon/config/prefill_config.h"
#include "daemon/config/yaml_message.h"
#include "daemon/runtime/host_port.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/regular_file.h"
#include "storage/lookup/lease.h"
#include "storage/memory/numa.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kDefaultArenaBytes = uint64_t{64} << 20;
constexpr uint32_t kDefaultDiskThreads = 8;
constexpr uint32_t kDefaultDiskQueue = 256;
constexpr uint64_t kDefaultRegionBytes = uint64_t{64} << 30;
constexpr uint64_t kDefaultLandingBytes = uint64_t{512} << 20;
constexpr uint64_t kLeastLandingBytes = uint64_t{32} << 20;  // the largest request fits
constexpr uint64_t kSessionsOfATenant = 8;  // number of sessions whose regions may all have the largest size
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 50;  // keeps all sums of budgets far from overflow
constexpr uint64_t kMaxSeconds = 366 * 24 * 3600;
constexpr uint32_t kMaxSessions = 65536;
constexpr uint32_t kMostLeases = 1 << 24, kMostLeasedSegments = 1 << 28;  // some gigabytes per tenant
constexpr uint32_t kDefaultRegions = 64;                                  // per session
constexpr uint32_t kRegionsForASession = 16;                              // regions of a tenant per session
constexpr uint32_t kRegionsOfAll = 16384;  // default: a quarter of the kernel's default limit on mappings
constexpr uint32_t kMaxRegions = 1 << 24;
constexpr uint64_t kDefaultModelBytes = uint64_t{256} << 20;
constexpr uint32_t kDefaultKeptBatches = 10'000, kMaxKeptBatches = 1 << 20;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxQueueDepth = 1 << 20;
// One place for the record of erasures and one for the tier's own work, which is not retried by others.
constexpr uint32_t kLeastDiskQueue = 2;
constexpr int kMaxTenants = 4096;

void FillTierDefaults(v1::Config* config) {
  FillGpuDefaults(config);
  for (v1::Hbm& hbm : *config->mutable_hbm()) {
    if (hbm.arena_bytes() == 0) hbm.set_arena_bytes(std::min(kDefaultArenaBytes, hbm.capacity_bytes()));
  }
  v1::Ssd* ssd = config->mutable_ssd();
  if (ssd->admission().empty()) ssd->set_admission("second_use");
  if (ssd->on_damage().empty()) ssd->set_on_damage("quarantine");
  if (ssd->threads() == 0) ssd->set_threads(kDefaultDiskThreads);
  if (ssd->queue_depth() == 0) ssd->set_queue_depth(kDefaultDiskQueue);
}

void FillDefaults(v1::Config* config) {
  v1::Dram* dram = config->mutable_dram();
  if (dram->arena_bytes() == 0) dram->set_arena_bytes(kDefaultArenaBytes);
  dram->mutable_numa();
  FillTierDefaults(config);
  if (config->events().topic().empty()) config->mutable_events()->set_topic("kv-events");
  if (config->events().kept_batches() == 0) config->mutable_events()->set_kept_batches(kDefaultKeptBatches);
  if (config->eviction().empty()) config->set_eviction("price");
  if (config->sandbox().empty()) config->set_sandbox("off");
  config->mutable_scrub();
  v1::Listen* listen = config->mutable_listen();
  if (listen->metrics_socket_access().empty()) listen->set_metrics_socket_access("owner");
  if (config->metrics().tenants().empty()) config->mutable_metrics()->set_tenants("summed");
  if (config->tenants().empty()) {
    v1::Tenant* tenant = config->add_tenants();
    tenant->set_name("default");
    tenant->add_uids(geteuid());
    tenant->set_dram_bytes(dram->capacity_bytes());
    tenant->set_hbm_bytes(LeastHbm(*config));
    tenant->set_ssd_bytes(config->ssd().capacity_bytes());
  }
  v1::Leases* leases = config->mutable_leases();
  if (leases->unused_seconds() == 0) leases->set_unused_seconds(60);
  if (leases->reservation_seconds() == 0) leases->set_reservation_seconds(60);
  if (leases->max_leases() == 0) leases->set_max_leases(storage::LeaseTable::kTenantLeases);
  if (leases->max_segments() == 0) leases->set_max_segments(storage::LeaseTable::kTenantSegments);
  if (config->drain_seconds() == 0) config->set_drain_seconds(10);
  v1::Sessions* sessions = config->mutable_sessions();
  if (sessions->max_sessions() == 0) sessions->set_max_sessions(256);
  if (sessions->region_bytes() == 0) sessions->set_region_bytes(kDefaultRegionBytes);
  if (sessions->max_regions() == 0) sessions->set_max_regions(kDefaultRegions);
  FillPrefillDefaults(config);
  v1::Workers* workers = config->mutable_workers();
  if (workers->threads() == 0) workers->set_threads(std::max(1u, std::thread::hardware_concurrency()));
  if (workers->queue_depth() == 0) workers->set_queue_depth(1024);
  if (workers->landings_per_session() == 0) workers->set_landings_per_session(256);
  const auto share_of = [&](uint32_t bound) {
    return std::max(1u, bound / static_cast<uint32_t>(config->tenants_size()));
  };
  for (v1::Tenant& tenant : *config->mutable_tenants()) {
    if (tenant.region_bytes() == 0) tenant.set_region_bytes(kSessionsOfATenant * sessions->region_bytes());
    if (tenant.max_sessions() == 0) tenant.set_max_sessions(share_of(sessions->max_sessions()));
    if (tenant.max_landings() == 0) tenant.set_max_landings(share_of(workers->queue_depth()));
    if (tenant.landing_bytes() == 0) tenant.set_landing_bytes(kDefaultLandingBytes);
    if (tenant.max_leases() == 0) tenant.set_max_leases(leases->max_leases());
    if (tenant.max_leased_segments() == 0) tenant.set_max_leased_segments(leases->max_segments());
    if (tenant.max_regions() == 0) {
      const uint64_t wanted = uint64_t{kRegionsForASession} * tenant.max_sessions();
      tenant.set_max_regions(static_cast<uint32_t>(std::min<uint64_t>(wanted, share_of(kRegionsOfAll))));
    }
    if (tenant.model_bytes() == 0) tenant.set_model_bytes(kDefaultModelBytes);
    tenant.mutable_public_floor();
    tenant.mutable_private_floor();
    if (tenant.prefix_bytes() == 0) {
      tenant.set_prefix_bytes(std::max({tenant.dram_bytes(), tenant.hbm_bytes(), tenant.ssd_bytes()}));
    }
  }
  v1::Log* log = config->mutable_log();
  if (log->level().empty()) log->set_level("info");
  if (log->format().empty()) log->set_format("text");
  if (config->has_cluster()) FillClusterDefaults(config->mutable_cluster());
}

absl::Status CheckSocketPath(absl::string_view field, const std::string& path) {
  constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty()) return Invalid(field, ": required");
  if (path.size() > kMaxPath) return Invalid(field, ": too long; expected at most ", kMaxPath, " bytes");
  if (path.find('\0') != std::string::npos) return Invalid(field, ": contains a zero byte");
  return absl::OkStatus();
}

absl::Status CheckEvents(const v1::Events& events) {
  const struct {
    absl::string_view field;
    const std::string& address;
  } addresses[] = {{"events.zmq_address", events.zmq_address()},
                   {"events.zmq_replay_address", events.zmq_replay_address()}};
  for (const auto& [field, address] : addresses) {
    const bool known = absl::StartsWith(address, "tcp://") || absl::StartsWith(address, "ipc://");
    if (!address.empty() && !known) return Invalid(field, ": expected tcp://HOST:PORT or ipc://PATH");
  }
  if (events.zmq_address().empty() && !events.zmq_replay_address().empty()) {
    return Invalid("events.zmq_address: required with zmq_replay_address");
  }
  if (events.kept_batches() > kMaxKeptBatches)
    return Invalid("events.kept_batches: out of range; expected at most ", kMaxKeptBatches);
  return absl::OkStatus();
}

absl::Status CheckListen(const v1::Listen& listen) {
  struct Socket {
    absl::string_view field;
    const std::string& path;
    bool required;
  };
  const Socket sockets[] = {
      {"listen.rpc_socket", listen.rpc_socket(), true},
      {"listen.session_socket", listen.session_socket(), true},
      {"listen.admin_socket", listen.admin_socket(), false},
      {"listen.metrics_socket", listen.metrics_socket(), false},
  };
  std::map<std::string, absl::string_view> field_of_path;
  for (const Socket& socket : sockets) {
    if (socket.path.empty() && !socket.required) continue;
    if (absl::Status status = CheckSocketPath(socket.field, socket.path); !status.ok()) return status;
    const auto [other, fresh] = field_of_path.emplace(socket.path, socket.field);
    if (!fresh) return Invalid(socket.field, ": same as ", other->second);
  }
  if (listen.metrics_socket_access() != "owner" && listen.metrics_socket_access() != "group") {
    return Invalid("listen.metrics_socket_access: \"", listen.metrics_socket_access(), "\"; expected owner or group");
  }
  if (listen.metrics_address().empty()) return absl::OkStatus();
  const auto address = ParseHostPort(listen.metrics_address());
  return address.ok() ? absl::OkStatus() : Invalid("listen.metrics_address: ", address.status().message());
}

// For the hbm or dram tier, which has a capacity.
template <typename Memory>
absl::Status CheckMemory(absl::string_view field, const Memory& memory) {
  if (memory.capacity_bytes() > kMaxMemoryBytes)
    return Invalid(field, ".capacity_bytes: out of range; expected at most ", kMaxMemoryBytes);
  if (memory.arena_bytes() % limits::kExtentBytes != 0) {
    return Invalid(field, ".arena_bytes: ", memory.arena_bytes(), "; expected a multiple of the extent, ",
                   limits::kExtentBytes, " bytes");
  }
  if (memory.arena_bytes() > memory.capacity_bytes()) {
    return Invalid(field, ".arena_bytes: ", memory.arena_bytes(), "; expected at most ", field, ".capacity_bytes, ",
                   memory.capacity_bytes());
  }
  return absl::OkStatus();
}

absl::Status CheckNuma(const v1::Numa& numa) {
  const std::set<std::string> policies = {"bind", "preferred", "interleave"};
  if (numa.policy().empty() && numa.nodes().empty()) return absl::OkStatus();
  if (!policies.contains(numa.policy()))
    return Invalid("dram.numa.policy: \"", numa.policy(), "\"; expected bind, preferred or interleave");
  if (numa.nodes().empty()) return Invalid("dram.numa.nodes: required with dram.numa.policy");
  if (numa.policy() == "preferred" && numa.nodes_size() > 1)
    return Invalid("dram.numa.nodes: ", numa.nodes_size(), " nodes; expected one with policy preferred");
  std::set<uint32_t> nodes;
  for (int i = 0; i < numa.nodes_size(); ++i) {
    if (numa.nodes(i) >= storage::NumaPolicy::kMaxNodes)
      return Invalid("dram.numa.nodes[", i, "]: ", numa.nodes(i), "; expected less than ",
                     storage::NumaPolicy::kMaxNodes);
    if (!nodes.insert(numa.nodes(i)).second) return Invalid("dram.numa.nodes[", i, "]: given twice");
  }
  return absl::OkStatus();
}

absl::Status CheckTiers(const v1::Config& config) {
  if (config.dram().capacity_bytes() == 0) return Invalid("dram.capacity_bytes: required");
  if (absl::Status status = CheckMemory("dram", config.dram()); !status.ok()) return status;
  if (absl::Status status = CheckNuma(config.dram().numa()); !status.ok()) return status;
  if (absl::Status status = CheckGpus(config); !status.ok()) return status;
  for (int i = 0; i < config.hbm_size(); ++i) {
    if (absl::Status status = CheckMemory(HbmField(config, i), config.hbm(i)); !status.ok()) return status;
  }
  const v1::Ssd& ssd = config.ssd();
  if (ssd.folder().find('\0') != std::string::npos) return Invalid("ssd.folder: contains a zero byte");
  if (ssd.folder().empty() && ssd.capacity_bytes() > 0) return Invalid("ssd.folder: required with ssd.capacity_bytes");
  if (!ssd.folder().empty() && ssd.capacity_bytes() < limits::kExtentBytes) {
    return Invalid("ssd.capacity_bytes: ", ssd.capacity_bytes(), "; expected at least one extent, ",
                   limits::kExtentBytes, " bytes");
  }
  if (ssd.capacity_bytes() > kMaxMemoryBytes)
    return Invalid("ssd.capacity_bytes: out of range; expected at most ", kMaxMemoryBytes);
  const std::set<std::string> admissions = {"all", "second_use", "tinylfu"};
  if (!admissions.contains(ssd.admission()))
    return Invalid("ssd.admission: \"", ssd.admission(), "\"; expected all, second_use or tinylfu");
  if (ssd.on_damage() == "set_aside") return Invalid("ssd.on_damage: set_aside is renamed; use quarantine");
  if (ssd.on_damage() != "quarantine" && ssd.on_damage() != "refuse") {
    return Invalid("ssd.on_damage: \"", ssd.on_damage(), "\"; expected quarantine or refuse");
  }
  if (config.eviction() != "price" && config.eviction() != "lru")
    return Invalid("eviction: \"", config.eviction(), "\"; expected price or lru");
  if (ssd.threads() > kMaxThreads) return Invalid("ssd.threads: out of range; expected at most ", kMaxThreads);
  if (ssd.queue_depth() < kLeastDiskQueue) {
    return Invalid("ssd.queue_depth: ", ssd.queue_depth(), " is too small; expected at least ", kLeastDiskQueue);
  }
  if (ssd.queue_depth() > kMaxQueueDepth)
    return Invalid("ssd.queue_depth: out of range; expected at most ", kMaxQueueDepth);
  return absl::OkStatus();
}

// Budgets of all tenants in one tier, and the floors of their pools.
struct TierBudgets {
  std::string name;
  std::string field;  // configuration field of the tier
  uint64_t capacity;
  uint64_t least;  // minimum of a budget; 0 excludes a tenant from the tier
  uint64_t (v1::Tenant::*budget)() const;
  uint64_t (v1::Floor::*floor)() const;
};

absl::Status CheckBudgets(const v1::Config& config, const TierBudgets& tier) {
  uint64_t budgets = 0;
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const uint64_t budget = (tenant.*tier.budget)();
    const std::string field = absl::StrCat("tenants[", i, "].", tier.name, "_bytes");
    if (tier.capacity == 0 && budget > 0) return Invalid(field, ": the configuration has no tier ", tier.name);
    if (tier.least > 0 && budget == 0) return Invalid(field, ": required");
    if (budget < tier.least) return Invalid(field, ": must be at least one arena, ", tier.least, " bytes");
    if (budget > tier.capacity - budgets) {
      return Invalid(field, ": the tenants' budgets together exceed ", tier.field, ".capacity_bytes");
    }
    budgets += budget;
    const uint64_t open = (tenant.public_floor().*tier.floor)(), own = (tenant.private_floor().*tier.floor)();
    const auto floor = [&](absl::string_view pool) {
      return absl::StrCat("tenants[", i, "].", pool, "_floor.", tier.name, "_bytes");
    };
    if (open > budget) return Invalid(floor("public"), ": must not exceed ", field);
    if (own > budget - open) return Invalid(floor("private"), ": public and private floors together exceed ", field);
  }
  return absl::OkStatus();
}

// The kernel gives this user to every process of a user namespace that does not map its user.
absl::Status CheckUser(const std::string& field, uint32_t uid) {
  uint32_t overflow = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  if (uid != overflow) return absl::OkStatus();
  return Invalid(field, ": ", uid,
                 " is the overflow user, which unmapped users of every user namespace share; use a real user");
}

absl::Status CheckTenants(const v1::Config& config) {
  if (config.tenants_size() > kMaxTenants) return Invalid("tenants: too many; expected at most ", kMaxTenants);
  std::set<std::string> names;
  std::map<uint32_t, std::string> tenant_of_uid;
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const std::string field = absl::StrCat("tenants[", i, "]");
    if (absl::Status status = CheckName(absl::StrCat(field, ".name"), tenant.name()); !status.ok()) return status;
    if (!names.insert(tenant.name()).second) return Invalid(field, ".name: \"", tenant.name(), "\" is given twice");
    if (tenant.uids().empty()) return Invalid(field, ".uids: required");
    for (int j = 0; j < tenant.uids_size(); ++j) {
      const absl::Status user = CheckUser(absl::StrCat(field, ".uids[", j, "]"), tenant.uids(j));
      if (!user.ok()) return user;
      const auto [other, fresh] = tenant_of_uid.emplace(tenant.uids(j), tenant.name());
      if (!fresh)
        return Invalid(field, ".uids[", j, "]: ", tenant.uids(j), " already belongs to \"", other->second, "\"");
    }
    if (tenant.ttl_seconds() > kMaxSeconds)
      return Invalid(field, ".ttl_seconds: out of range; expected at most ", kMaxSeconds);
  }
  std::vector<TierBudgets> tiers = {
      {"dram", "dram", config.dram().capacity_bytes(), config.dram().arena_bytes(), &v1::Tenant::dram_bytes,
       &v1::Floor::dram_bytes},
      {"ssd", "ssd", config.ssd().capacity_bytes(), 0, &v1::Tenant::ssd_bytes, &v1::Floor::ssd_bytes},
  };
  for (int i = 0; i < config.hbm_size(); ++i) {
    tiers.push_back({"hbm", HbmField(config, i), config.hbm(i).capacity_bytes(), config.hbm(i).arena_bytes(),
                     &v1::Tenant::hbm_bytes, &v1::Floor::hbm_bytes});
  }
  if (config.hbm().empty()) tiers.push_back({"hbm", "hbm", 0, 0, &v1::Tenant::hbm_bytes, &v1::Floor::hbm_bytes});
  for (const TierBudgets& tier : tiers) {
    if (absl::Status status = CheckBudgets(config, tier); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckBounds(const v1::Config& config) {
  if (config.leases().unused_seconds() > kMaxSeconds)
    return Invalid("leases.unused_seconds: out of range; expected at most ", kMaxSeconds);
  if (config.leases().reservation_seconds() > kMaxSeconds)
    return Invalid("leases.reservation_seconds: out of range; expected at most ", kMaxSeconds);
  if (config.leases().max_leases() > kMostLeases)
    return Invalid("leases.max_leases: out of range; expected at most ", kMostLeases);
  if (config.leases().max_segments() > kMostLeasedSegments)
    return Invalid("leases.max_segments: out of range; expected at most ", kMostLeasedSegments);
  if (config.drain_seconds() > kMaxSeconds)
    return Invalid("drain_seconds: out of range; expected at most ", kMaxSeconds);
  if (config.sessions().max_sessions() > kMaxSessions)
    return Invalid("sessions.max_sessions: out of range; expected at most ", kMaxSessions);
  if (config.sessions().region_bytes() > kMaxMemoryBytes)
    return Invalid("sessions.region_bytes: out of range; expected at most ", kMaxMemoryBytes);
  if (config.sessions().max_regions() > kMaxRegions)
    return Invalid("sessions.max_regions: out of range; expected at most ", kMaxRegions);
  if (absl::Status status = CheckPrefill(config); !status.ok()) return status;
  // Checked before the values that depend on it.
  if (config.workers().queue_depth() > kMaxQueueDepth)
    return Invalid("workers.queue_depth: out of range; expected at most ", kMaxQueueDepth);
  for (int i = 0; i < config.tenants_size(); ++i) {
    if (config.tenants(i).region_bytes() > kSessionsOfATenant * kMaxMemoryBytes) {
      return Invalid("tenants[", i, "].region_bytes: out of range; expected at most ",
                     kSessionsOfATenant * kMaxMemoryBytes);
    }
    if (config.tenants(i).prefix_bytes() > kMaxMemoryBytes)
      return Invalid("tenants[", i, "].prefix_bytes: out of range; expected at most ", kMaxMemoryBytes);
    if (config.tenants(i).max_landings() > kMaxQueueDepth)
      return Invalid("tenants[", i, "].max_landings: out of range; expected at most ", kMaxQueueDepth);
    if (config.tenants(i).landing_bytes() < kLeastLandingBytes) {
      return Invalid("tenants[", i, "].landing_bytes: ", config.tenants(i).landing_bytes(), "; expected at least ",
                     kLeastLandingBytes, " bytes, which is one landing");
    }
    if (config.tenants(i).landing_bytes() > kMaxMemoryBytes)
      return Invalid("tenants[", i, "].landing_bytes: out of range; expected at most ", kMaxMemoryBytes);
    if (config.tenants(i).max_leases() > kMostLeases)
      return Invalid("tenants[", i, "].max_leases: out of range; expected at most ", kMostLeases);
    if (config.tenants(i).max_leased_segments() > kMostLeasedSegments) {
      return Invalid("tenants[", i, "].max_leased_segments: out of range; expected at most ", kMostLeasedSegments);
    }
    if (config.tenants(i).max_regions() > kMaxRegions)
      return Invalid("tenants[", i, "].max_regions: out of range; expected at most ", kMaxRegions);
    if (config.tenants(i).model_bytes() > kMaxMemoryBytes)
      return Invalid("tenants[", i, "].model_bytes: out of range; expected at most ", kMaxMemoryBytes);
    if (config.tenants(i).max_sessions() > config.sessions().max_sessions()) {
      return Invalid("tenants[", i, "].max_sessions: must not exceed sessions.max_sessions");
    }
  }
  if (config.workers().threads() > kMaxThreads)
    return Invalid("workers.threads: out of range; expected at most ", kMaxThreads);
  if (config.workers().landings_per_session() > kMaxQueueDepth) {
    return Invalid("workers.landings_per_session: out of range; expected at most ", kMaxQueueDepth);
  }
  if (config.metrics().tenants() != "summed" && config.metrics().tenants() != "named") {
    return Invalid("metrics.tenants: \"", config.metrics().tenants(), "\"; expected summed or named");
  }
  const std::set<std::string> levels = {"trace", "debug", "info", "warning", "error"};
  if (!levels.contains(config.log().level())) {
    return Invalid("log.level: \"", config.log().level(), "\"; expected trace, debug, info, warning or error");
  }
  if (config.log().format() != "text" && config.log().format() != "json") {
    return Invalid("log.format: \"", config.log().format(), "\"; expected text or json");
  }
  if (!config.log().audit_file().empty() && config.log().audit_file().front() != '/') {
    return Invalid("log.audit_file: must be an absolute path");
  }
  if (config.scrub().bytes_per_second() > kMaxMemoryBytes)
    return Invalid("scrub.bytes_per_second: out of range; expected at most ", kMaxMemoryBytes);
  if (config.sandbox() != "off" && config.sandbox() != "on")
    return Invalid("sandbox: \"", config.sandbox(), "\"; expected off or on");
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseConfig(const std::string& yaml, v1::Config* config) {
  if (absl::Status status = ParseYaml(yaml, config); !status.ok()) return status;
  FillDefaults(config);
  if (absl::Status status = CheckListen(config->listen()); !status.ok()) return status;
  if (absl::Status status = CheckEvents(config->events()); !status.ok()) return status;
  if (absl::Status status = CheckTiers(*config); !status.ok()) return status;
  if (absl::Status status = CheckTenants(*config); !status.ok()) return status;
  if (absl::Status status = CheckBounds(*config); !status.ok()) return status;
  if (!config->has_cluster()) return absl::OkStatus();
  if (absl::Status status = CheckCluster(config->cluster()); !status.ok()) return status;
  return CheckPeers(*config);
}

absl::StatusOr<std::string> ExpandEnvironment(const std::string& text) {
  std::string expanded;
  size_t line = 1;
  bool comment = false;
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '\n') {
      ++line;
      comment = false;
    }
    comment |= c == '#' && (at == 0 || absl::ascii_isspace(static_cast<unsigned char>(text[at - 1])));
    if (comment || text.compare(at, 2, "${") != 0) {
      expanded += c;
      continue;
    }
    const size_t end = std::min(text.find('}', at), text.size());
    const std::string name = text.substr(at + 2, end - at - 2);
    const auto of_a_name = [](unsigned char each) { return absl::ascii_isalnum(each) || each == '_'; };
    if (end == text.size() || name.empty() || !std::ranges::all_of(name, of_a_name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", line, ": ${ must be followed by a variable's name and }"));
    }
    const char* const value = std::getenv(name.c_str());
    if (value == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", line, ": ${", name, "}: the environment variable is not set"));
    }
    expanded += value;
    at = end;
  }
  return expanded;
}

absl::Status LoadConfig(const std::string& path, v1::Config* config) {
  const absl::StatusOr<std::string> text = ReadRegularFile("config", path, kMaxConfigFileBytes);
  if (!text.ok()) return text.status();
  const absl::StatusOr<std::string> expanded = ExpandEnvironment(*text);
  absl::Status status = expanded.ok() ? ParseConfig(*expanded, config) : expanded.status();
  if (!status.ok()) return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  return status;
}

std::string FormatConfig(const v1::Config& config) {
  return FormatYaml(config);
}

}  // namespace ashlar::daemon
