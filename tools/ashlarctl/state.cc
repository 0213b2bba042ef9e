// SPDX-License-Identifier: Apache-2.0
// ashlarctl stats, sessions, config: the daemon's state.
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// Landings also miss, and every segment that they miss was a hit before: rates are relative to the requests of lookups
// and landings.
struct RequestTotals {
  uint64_t segments = 0, tokens = 0;
  void Add(const google::protobuf::RepeatedPtrField<v1::Tally>& tallies) {
    for (const v1::Tally& tally : tallies) {
      segments += tally.segments();
      tokens += tally.tokens();
    }
  }
};

json TenantJson(const v1::TenantStats& tenant) {
  RequestTotals totals;
  totals.Add(tenant.hits());
  totals.Add(tenant.misses());
  const auto rate = [](uint64_t part, uint64_t whole) {
    return whole == 0 ? json(nullptr) : json(static_cast<double>(part) / static_cast<double>(whole));
  };
  json out = {{"tenant", tenant.tenant()}, {"region_bytes", tenant.region_bytes()},
              {"tiers", json::array()},    {"hits", json::array()},
              {"misses", json::array()},   {"evictions", json::array()}};
  for (const v1::TierStats& tier : tenant.tiers()) {
    out["tiers"].push_back({{"tier", TierName(tier.tier())},
                            {"capacity_bytes", tier.capacity_bytes()},
                            {"used_bytes", tier.used_bytes()},
                            {"held_bytes", tier.held_bytes()}});
  }
  for (const v1::Tally& hits : tenant.hits()) {
    out["hits"].push_back({{"tier", TierName(hits.of())},
                           {"segments", hits.segments()},
                           {"tokens", hits.tokens()},
                           {"rate", rate(hits.segments(), totals.segments)},
                           {"token_rate", rate(hits.tokens(), totals.tokens)}});
  }
  for (const v1::Tally& misses : tenant.misses()) {
    out["misses"].push_back({{"reason", ReasonName(misses.of())},
                             {"segments", misses.segments()},
                             {"tokens", misses.tokens()},
                             {"rate", rate(misses.segments(), totals.segments)}});
  }
  for (const v1::Eviction& eviction : tenant.evictions()) {
    out["evictions"].push_back({{"tier", TierName(eviction.tier())},
                                {"policy", PolicyName(eviction.policy())},
                                {"reason", ReasonName(eviction.reason())},
                                {"objects", eviction.objects()},
                                {"bytes", eviction.bytes()}});
  }
  return out;
}

std::string TenantText(const v1::TenantStats& tenant) {
  RequestTotals totals;
  totals.Add(tenant.hits());
  totals.Add(tenant.misses());
  std::string text = absl::StrCat("tenant ", tenant.tenant(), ": ", totals.segments, " segments requested, regions of ",
                                  Bytes(tenant.region_bytes()), "\n");
  for (const v1::TierStats& tier : tenant.tiers()) {
    absl::StrAppendFormat(&text, "  %-18s %s of %s used, %s held\n", TierName(tier.tier()), Bytes(tier.used_bytes()),
                          Bytes(tier.capacity_bytes()), Bytes(tier.held_bytes()));
  }
  for (const v1::Tally& hits : tenant.hits()) {
    absl::StrAppendFormat(&text, "  hits from %-8s %s of segments, %s of tokens\n", TierName(hits.of()),
                          Percent(hits.segments(), totals.segments), Percent(hits.tokens(), totals.tokens));
  }
  for (const v1::Tally& misses : tenant.misses()) {
    absl::StrAppendFormat(&text, "  missed %-18s %s of segments (%d)\n", ReasonName(misses.of()),
                          Percent(misses.segments(), totals.segments), misses.segments());
  }
  for (const v1::Eviction& eviction : tenant.evictions()) {
    absl::StrAppend(&text, "  left ", TierName(eviction.tier()), ": ", eviction.objects(), " ",
                    ReasonName(eviction.reason()), " by ", PolicyName(eviction.policy()), ", ", Bytes(eviction.bytes()),
                    "\n");
  }
  return text;
}

}  // namespace

absl::StatusOr<Answer> Stats(const Arguments&, AdminClient& client) {
  v1::StatsReply reply;
  if (absl::Status status = client.Stats(v1::StatsRequest(), &reply); !status.ok()) return status;
  Answer answer;
  answer.json = {{"uptime_seconds", reply.uptime_seconds()},
                 {"objects", reply.objects()},
                 {"object_bytes", reply.object_bytes()},
                 {"leases", reply.leases()},
                 {"reservations", reply.reservations()},
                 {"landings", reply.landings()},
                 {"compositions", reply.compositions()},
                 {"sessions", reply.sessions()},
                 {"metadata_queue", reply.metadata_queue()},
                 {"worker_queue", reply.worker_queue()},
                 {"tenants", json::array()}};
  answer.text = absl::StrCat("up ", Duration(reply.uptime_seconds()), ": ", reply.objects(), " objects, ",
                             Bytes(reply.object_bytes()), "; ", reply.sessions(), " sessions, ", reply.leases(),
                             " leases, ", reply.reservations(), " reservations; ", reply.landings(), " landings and ",
                             reply.compositions(), " compositions in flight\n");
  answer.json["degraded"] = json::array();
  for (const v1::DegradedTier& tier : reply.degraded()) {
    answer.json["degraded"].push_back({{"tier", TierName(tier.tier())}, {"reason", tier.reason()}});
    absl::StrAppend(&answer.text, "degraded: ", TierName(tier.tier()), ": ", tier.reason(), "\n");
  }
  for (const v1::TenantStats& tenant : reply.tenants()) {
    answer.json["tenants"].push_back(TenantJson(tenant));
    answer.text += TenantText(tenant);
  }
  return answer;
}

absl::StatusOr<Answer> Sessions(const Arguments&, AdminClient& client) {
  v1::SessionsReply reply;
  if (absl::Status status = client.Sessions(v1::SessionsRequest(), &reply); !status.ok()) return status;
  Answer answer{.json = {{"sessions", json::array()}}};
  for (const v1::SessionInfo& session : reply.sessions()) {
    answer.json["sessions"].push_back({{"session", session.session()},
                                       {"tenant", session.tenant()},
                                       {"pid", session.pid()},
                                       {"uid", session.uid()},
                                       {"client", session.client()},
                                       {"release", session.release()},
                                       {"regions", session.regions()},
                                       {"region_bytes", session.region_bytes()},
                                       {"models", session.models()},
                                       {"draining", session.draining()}});
    absl::StrAppend(&answer.text, "session ", session.session(), ": tenant ", session.tenant(), ", pid ", session.pid(),
                    ", uid ", session.uid(), ", \"", Printable(session.client()), "\"",
                    session.release().empty() ? "" : " " + Printable(session.release()), ", ", session.models(),
                    " models, ", session.regions(), " regions of ", Bytes(session.region_bytes()),
                    session.draining() ? ", draining" : "", "\n");
  }
  if (answer.text.empty()) answer.text = "no sessions\n";
  return answer;
}

absl::StatusOr<Answer> Config(const Arguments&, AdminClient& client) {
  v1::GetConfigReply reply;
  if (absl::Status status = client.GetConfig(v1::GetConfigRequest(), &reply); !status.ok()) return status;
  return Answer{.json = {{"yaml", reply.yaml()}}, .text = reply.yaml(), .verbatim = true};
}

}  // namespace ashlar::ctl
