// ashlar.v1.Cache as gRPC calls it: requests judged while they are bytes, then parsed and given to the engine service.
#pragma once

#include <memory>

#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/rpc/calls_under_way.h"

namespace grpc {
class Service;
}

namespace ashlar::daemon {

// For the connections of one tenant. All must outlive it; its server goes first.
std::unique_ptr<grpc::Service> MakeCacheService(EngineService& service, Metrics& metrics, CallsUnderWay& calls);

}  // namespace ashlar::daemon
