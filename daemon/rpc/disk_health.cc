// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/disk_health.h"

#include "daemon/rpc/rpc_server.h"
#include "daemon/runtime/log.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

// Name of the ssd tier in the health service: NOT_SERVING while it is degraded, even though the daemon serves.
constexpr const char* kSsdHealth = "ashlar.v1.Ssd";

}  // namespace

void DiskHealth::Report(const std::string& error, RpcServer* server) {
  const bool now = !error.empty();
  if (server != nullptr && reported_ != now) {
    server->SetServing(kSsdHealth, !now);
    reported_ = now;
  }
  if (degraded_ == now) return;
  degraded_ = now;
  if (now) {
    Log(LogLevel::kError, "tier degraded: writes are suspended until it recovers",
        {{"tier", std::string(Name(TierKind::kSsd))}, {"error", error}});
  } else {
    Log(LogLevel::kInfo, "tier recovered", {{"tier", std::string(Name(TierKind::kSsd))}});
  }
}

}  // namespace ashlar::daemon
