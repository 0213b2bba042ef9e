// SPDX-License-Identifier: Apache-2.0
// CacheService: the gRPC service of ashlar.v1.Cache. It checks requests before parsing, then parses them and calls the
// engine service.
#pragma once

#include <sys/types.h>

#include <memory>

#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/rpc/call_memory.h"
#include "daemon/rpc/calls_under_way.h"
#include "daemon/rpc/request_reader.h"

namespace grpc {
class Service;
}

namespace ashlar::daemon {

// Shared by the services of one tenant's users.
struct TenantCalls {
  CallMemory memory;
  RequestReader reader;
};

// Creates the service for connections of one `user` of the tenant. It accepts only sessions of that user, so a leaked
// session secret is of no use to other users. All arguments must outlive it; its server is destroyed first.
std::unique_ptr<grpc::Service> MakeCacheService(EngineService& service, Metrics& metrics, CallsUnderWay& calls,
                                                TenantCalls& tenant, uid_t user);

}  // namespace ashlar::daemon
