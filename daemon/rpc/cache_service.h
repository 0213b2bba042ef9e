// The gRPC service of ashlar.v1.Cache: it checks requests while they are bytes, then parses them and calls the engine
// service.
#pragma once

#include <memory>

#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/rpc/calls_under_way.h"

namespace grpc {
class Service;
}

namespace ashlar::daemon {

// Makes the service for the connections of one tenant. All arguments must outlive it; its server is destroyed first.
std::unique_ptr<grpc::Service> MakeCacheService(EngineService& service, Metrics& metrics, CallsUnderWay& calls);

}  // namespace ashlar::daemon
