// SPDX-License-Identifier: Apache-2.0
// Operators' calls on the daemon: Stats, Sessions, Peers, GetConfig and drains. Also the common part of all calls.
#include "daemon/admin/admin_service.h"

#include <future>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.pb.h"
#include "proto/version.h"

namespace ashlar::daemon {
namespace {

using storage::TenantId;

void WriteTallies(const Tallies& tallies, v1::TenantStats* out) {
  const auto write = [](uint32_t of, const Tallies::Segments& tally, v1::Tally* to) {
    to->set_of(of);
    to->set_segments(tally.segments);
    to->set_tokens(tally.tokens);
  };
  for (const auto& [tier, tally] : tallies.hits) write(static_cast<uint32_t>(tier), tally, out->add_hits());
  for (const auto& [reason, tally] : tallies.misses) write(static_cast<uint32_t>(reason), tally, out->add_misses());
  for (const auto& [why, tally] : tallies.evictions) {
    v1::Eviction* eviction = out->add_evictions();
    eviction->set_tier(static_cast<uint32_t>(std::get<TierKind>(why)));
    eviction->set_policy(static_cast<uint32_t>(std::get<PolicyKind>(why)));
    eviction->set_reason(static_cast<uint32_t>(std::get<MissReason>(why)));
    eviction->set_objects(tally.objects);
    eviction->set_bytes(tally.bytes);
  }
}

void WriteCluster(const std::string& node, const ClusterFigures& figures, v1::ClusterStats* out) {
  out->set_node(node);
  out->set_members(figures.members);
  out->set_peers_connected(figures.peers_connected);
  out->set_directory_connected(figures.directory_connected);
  out->set_directory_entries(figures.directory_entries);
  out->set_fetched_objects(figures.opened);
  out->set_fetched_bytes(figures.fetched_bytes);
  out->set_failed_objects(figures.failed);
  out->set_rdma_fallback(figures.rdma_fallback);
}

}  // namespace

absl::StatusOr<TenantId> AdminService::FindTenant(const std::string& name) const {
  if (name.empty()) return absl::InvalidArgumentError("tenant: required");
  for (TenantId tenant = 0; tenant < parts_.tenants.size(); ++tenant) {
    if (parts_.tenants[tenant] == name) return tenant;
  }
  return absl::NotFoundError(absl::StrCat("tenant: \"", name, "\" is not in the daemon's configuration"));
}

absl::StatusOr<std::vector<TenantId>> AdminService::FindTenants(const std::string& name) const {
  if (name.empty()) {
    std::vector<TenantId> all(parts_.tenants.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  const absl::StatusOr<TenantId> one = FindTenant(name);
  if (!one.ok()) return one.status();
  return std::vector<TenantId>{*one};
}

absl::Status AdminService::OnLoop(const std::function<void()>& ask) const {
  std::promise<void> asked;
  const bool posted = parts_.loop.Post(storage::kNoTenant, [&] {
    ask();
    asked.set_value();
  });
  if (!posted) return absl::ResourceExhaustedError("the daemon's metadata queue is full; try again");
  asked.get_future().wait();
  return absl::OkStatus();
}

absl::Status AdminService::Stats(const v1::StatsRequest&, v1::StatsReply* reply) const {
  return OnLoop([&] {
    const Levels levels = parts_.measure();
    reply->set_objects(levels.objects);
    reply->set_object_bytes(levels.object_bytes);
    reply->set_leases(levels.leases);
    reply->set_reservations(levels.reservations);
    reply->set_landings(levels.landings);
    reply->set_compositions(levels.compositions);
    reply->set_sessions(levels.sessions);
    reply->set_metadata_queue(levels.metadata_queue);
    reply->set_worker_queue(levels.worker_queue);
    reply->set_uptime_seconds(static_cast<double>(parts_.clock.Now() - started_) * 1e-9);
    reply->set_draining(levels.draining);
    reply->set_version(Version());
    if (!parts_.node.empty()) WriteCluster(parts_.node, levels.cluster, reply->mutable_cluster());
    for (const auto& [tier, reason] : levels.degraded) {
      v1::DegradedTier* degraded = reply->add_degraded();
      degraded->set_tier(static_cast<uint32_t>(tier));
      degraded->set_reason(reason);
    }
    for (TenantId tenant = 0; tenant < parts_.tenants.size(); ++tenant) {
      v1::TenantStats* out = reply->add_tenants();
      out->set_tenant(parts_.tenants[tenant]);
      out->set_region_bytes(levels.holdings[tenant].region_bytes);
      for (const auto& [tier, usages] : levels.tiers) {
        const storage::TierUsage& usage = usages[tenant];
        v1::TierStats* stats = out->add_tiers();
        stats->set_tier(static_cast<uint32_t>(tier));
        stats->set_capacity_bytes(usage.capacity_bytes);
        stats->set_used_bytes(usage.used_bytes);
        stats->set_held_bytes(usage.held_bytes);
      }
      WriteTallies(parts_.metrics.tallies(tenant), out);
    }
  });
}

absl::Status AdminService::Sessions(const v1::SessionsRequest&, v1::SessionsReply* reply) const {
  for (const auto& [session, draining] : parts_.sessions.List()) {
    const Session::Description& about = session->about();
    const Session::Memory memory = session->memory();
    v1::SessionInfo* info = reply->add_sessions();
    info->set_session(about.id);
    info->set_tenant(about.tenant_name);
    info->set_pid(about.pid);
    info->set_uid(about.uid);
    info->set_client(about.client);
    info->set_release(about.release);
    info->set_regions(memory.regions);
    info->set_region_bytes(memory.bytes);
    info->set_models(session->models());
    info->set_draining(draining);
  }
  return absl::OkStatus();
}

absl::Status AdminService::Peers(const v1::PeersRequest&, v1::PeersReply* reply) const {
  return OnLoop([&] {
    for (const PeerFigures& peer : parts_.measure().cluster.peers) {
      v1::PeerInfo* info = reply->add_peers();
      info->set_node(peer.node);
      info->set_version(peer.version);
      info->set_control_address(peer.control_address);
      info->set_transport_address(peer.transport_address);
      info->set_connected(peer.connected);
      info->set_protocol(peer.path);
      info->set_lanes(peer.lanes);
      info->set_bytes_per_second(peer.bytes_per_second);
      info->set_rtt_seconds(peer.rtt_seconds);
      info->set_received_bytes(peer.received_bytes);
      info->set_sent_bytes(peer.sent_bytes);
      info->set_failed_calls(peer.failed_calls);
      info->set_lost_connections(peer.lost_connections);
      info->set_stalls(peer.stalls);
      info->set_held_there(peer.held_there);
      info->set_held_there_bytes(peer.held_there_bytes);
      info->set_held_here(peer.held_here);
      info->set_held_here_bytes(peer.held_here_bytes);
    }
  });
}

absl::Status AdminService::Drain(const v1::DrainRequest&, v1::DrainReply* reply) const {
  parts_.set_draining(true);
  return DescribeDrain(reply);
}

absl::Status AdminService::Undrain(const v1::UndrainRequest&, v1::DrainReply* reply) const {
  if (!parts_.set_draining(false)) return absl::FailedPreconditionError("the daemon is stopping");
  return DescribeDrain(reply);
}

absl::Status AdminService::GetDrain(const v1::GetDrainRequest&, v1::DrainReply* reply) const {
  return DescribeDrain(reply);
}

absl::Status AdminService::DescribeDrain(v1::DrainReply* reply) const {
  return OnLoop([&] {
    const Levels levels = parts_.measure();
    reply->set_draining(levels.draining);
    reply->set_done(levels.drained());
    reply->set_grace_seconds(parts_.drain_seconds());
    reply->set_leases(levels.leases);
    reply->set_requests(levels.admissions());
    reply->set_reservations(levels.reservations);
    reply->set_landings(levels.landings);
    reply->set_compositions(levels.compositions);
    reply->set_writing(levels.writing_behind);
    reply->set_memory_only_objects(levels.memory_only_objects);
    reply->set_memory_only_bytes(levels.memory_only_bytes);
  });
}

absl::Status AdminService::GetConfig(const v1::GetConfigRequest&, v1::GetConfigReply* reply) const {
  reply->set_yaml(parts_.config());
  return absl::OkStatus();
}

absl::Status AdminService::Reload(const v1::ReloadRequest& request, v1::ReloadReply* reply) const {
  const absl::StatusOr<std::vector<ConfigChange>> changes = parts_.reload(request.dry_run());
  if (!changes.ok()) return changes.status();
  for (const ConfigChange& change : *changes) {
    v1::ConfigChange* out = reply->add_changes();
    out->set_field(change.field);
    out->set_before(change.before);
    out->set_after(change.after);
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
