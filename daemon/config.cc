#include "daemon/config.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/yaml_message.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kDefaultArenaBytes = uint64_t{64} << 20;
constexpr uint64_t kDefaultRegionBytes = uint64_t{64} << 30;
constexpr uint64_t kSessionsOfATenant = 8;               // whose regions may be as large as a session's may be
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 50;  // keeps every sum of budgets far from overflow
constexpr uint64_t kMaxSeconds = 366 * 24 * 3600;
constexpr uint32_t kMaxSessions = 65536;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxQueueDepth = 1 << 20;
constexpr int kMaxTenants = 4096;
constexpr size_t kMaxTenantName = 64;

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

void FillDefaults(v1::Config* config) {
  v1::Dram* dram = config->mutable_dram();
  if (dram->arena_bytes() == 0) dram->set_arena_bytes(kDefaultArenaBytes);
  if (config->tenants().empty()) {
    v1::Tenant* tenant = config->add_tenants();
    tenant->set_name("default");
    tenant->add_uids(geteuid());
    tenant->set_dram_bytes(dram->capacity_bytes());
  }
  v1::Leases* leases = config->mutable_leases();
  if (leases->unused_seconds() == 0) leases->set_unused_seconds(60);
  if (leases->reservation_seconds() == 0) leases->set_reservation_seconds(60);
  v1::Sessions* sessions = config->mutable_sessions();
  if (sessions->max_sessions() == 0) sessions->set_max_sessions(256);
  if (sessions->region_bytes() == 0) sessions->set_region_bytes(kDefaultRegionBytes);
  for (v1::Tenant& tenant : *config->mutable_tenants()) {
    if (tenant.region_bytes() == 0) tenant.set_region_bytes(kSessionsOfATenant * sessions->region_bytes());
    const uint32_t share = sessions->max_sessions() / static_cast<uint32_t>(config->tenants_size());
    if (tenant.max_sessions() == 0) tenant.set_max_sessions(std::max(1u, share));
  }
  v1::Workers* workers = config->mutable_workers();
  if (workers->threads() == 0) workers->set_threads(std::max(1u, std::thread::hardware_concurrency()));
  if (workers->queue_depth() == 0) workers->set_queue_depth(1024);
  v1::Log* log = config->mutable_log();
  if (log->level().empty()) log->set_level("info");
  if (log->format().empty()) log->set_format("text");
}

absl::Status CheckSocketPath(absl::string_view field, const std::string& path) {
  constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty()) return Bad(field, ": required");
  if (path.size() > kMaxPath) return Bad(field, ": longer than ", kMaxPath, " bytes");
  if (path.find('\0') != std::string::npos) return Bad(field, ": contains a zero byte");
  return absl::OkStatus();
}

absl::Status CheckListen(const v1::Listen& listen) {
  absl::Status status = CheckSocketPath("listen.rpc_socket", listen.rpc_socket());
  if (!status.ok()) return status;
  status = CheckSocketPath("listen.session_socket", listen.session_socket());
  if (!status.ok()) return status;
  if (listen.rpc_socket() == listen.session_socket()) return Bad("listen.session_socket: same as listen.rpc_socket");
  if (!listen.admin_socket().empty()) {
    status = CheckSocketPath("listen.admin_socket", listen.admin_socket());
    if (!status.ok()) return status;
    for (const std::string* other : {&listen.rpc_socket(), &listen.session_socket()}) {
      if (listen.admin_socket() == *other) return Bad("listen.admin_socket: same as another socket");
    }
  }
  const std::string& address = listen.metrics_address();
  if (address.empty()) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return Bad("listen.metrics_address: expected host:port");
  }
  return absl::OkStatus();
}

absl::Status CheckDram(const v1::Dram& dram) {
  if (dram.capacity_bytes() == 0) return Bad("dram.capacity_bytes: required");
  if (dram.capacity_bytes() > kMaxMemoryBytes) return Bad("dram.capacity_bytes: out of range");
  if (dram.arena_bytes() % limits::kExtentBytes != 0) {
    return Bad("dram.arena_bytes: not a multiple of the extent, ", limits::kExtentBytes, " bytes");
  }
  if (dram.arena_bytes() > dram.capacity_bytes()) return Bad("dram.arena_bytes: larger than dram.capacity_bytes");
  return absl::OkStatus();
}

absl::Status CheckTenantName(absl::string_view field, const std::string& name) {
  if (name.empty()) return Bad(field, ": required");
  if (name.size() > kMaxTenantName) return Bad(field, ": longer than ", kMaxTenantName, " bytes");
  for (char c : name) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') {
      return Bad(field, ": only letters, digits, '.', '_' and '-'");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTenants(const v1::Config& config) {
  if (config.tenants_size() > kMaxTenants) return Bad("tenants: more than ", kMaxTenants);
  std::set<std::string> names;
  std::map<uint32_t, std::string> tenant_of_uid;
  uint64_t budgets = 0;
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const std::string field = absl::StrCat("tenants[", i, "]");
    if (absl::Status status = CheckTenantName(absl::StrCat(field, ".name"), tenant.name()); !status.ok()) return status;
    if (!names.insert(tenant.name()).second) return Bad(field, ".name: \"", tenant.name(), "\" is given twice");
    if (tenant.uids().empty()) return Bad(field, ".uids: required");
    for (int j = 0; j < tenant.uids_size(); ++j) {
      const auto [other, fresh] = tenant_of_uid.emplace(tenant.uids(j), tenant.name());
      if (!fresh) return Bad(field, ".uids[", j, "]: ", tenant.uids(j), " already belongs to \"", other->second, "\"");
    }
    if (tenant.dram_bytes() == 0) return Bad(field, ".dram_bytes: required");
    if (tenant.dram_bytes() < config.dram().arena_bytes()) return Bad(field, ".dram_bytes: less than one arena");
    if (tenant.dram_bytes() > config.dram().capacity_bytes() - budgets) {
      return Bad(field, ".dram_bytes: the tenants' budgets together exceed dram.capacity_bytes");
    }
    budgets += tenant.dram_bytes();
  }
  return absl::OkStatus();
}

absl::Status CheckBounds(const v1::Config& config) {
  if (config.leases().unused_seconds() > kMaxSeconds) return Bad("leases.unused_seconds: out of range");
  if (config.leases().reservation_seconds() > kMaxSeconds) return Bad("leases.reservation_seconds: out of range");
  if (config.sessions().max_sessions() > kMaxSessions) return Bad("sessions.max_sessions: out of range");
  if (config.sessions().region_bytes() > kMaxMemoryBytes) return Bad("sessions.region_bytes: out of range");
  for (int i = 0; i < config.tenants_size(); ++i) {
    if (config.tenants(i).region_bytes() > kSessionsOfATenant * kMaxMemoryBytes) {
      return Bad("tenants[", i, "].region_bytes: out of range");
    }
    if (config.tenants(i).max_sessions() > config.sessions().max_sessions()) {
      return Bad("tenants[", i, "].max_sessions: more than sessions.max_sessions");
    }
  }
  if (config.workers().threads() > kMaxThreads) return Bad("workers.threads: out of range");
  if (config.workers().queue_depth() > kMaxQueueDepth) return Bad("workers.queue_depth: out of range");
  const std::set<std::string> levels = {"trace", "debug", "info", "warning", "error"};
  if (!levels.contains(config.log().level())) {
    return Bad("log.level: expected trace, debug, info, warning or error");
  }
  if (config.log().format() != "text" && config.log().format() != "json") {
    return Bad("log.format: expected text or json");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseConfig(const std::string& yaml, v1::Config* config) {
  if (absl::Status status = ParseYaml(yaml, config); !status.ok()) return status;
  FillDefaults(config);
  if (absl::Status status = CheckListen(config->listen()); !status.ok()) return status;
  if (absl::Status status = CheckDram(config->dram()); !status.ok()) return status;
  if (absl::Status status = CheckTenants(*config); !status.ok()) return status;
  return CheckBounds(*config);
}

absl::Status LoadConfig(const std::string& path, v1::Config* config) {
  errno = 0;
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad() || text.fail()) {
    // Reading a folder or an empty file fails in the stream without an errno.
    return absl::ErrnoToStatus(errno == 0 ? EINVAL : errno, absl::StrCat("cannot read ", path));
  }
  absl::Status status = ParseConfig(text.str(), config);
  if (!status.ok()) return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  return status;
}

std::string FormatConfig(const v1::Config& config) {
  return FormatYaml(config);
}

}  // namespace ashlar::daemon
