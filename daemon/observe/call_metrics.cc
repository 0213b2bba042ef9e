#include "daemon/observe/call_metrics.h"

#include <string>

namespace ashlar::daemon {

CallMetrics::CallMetrics(prometheus::Registry& registry)
    : finished_(prometheus::BuildCounter()
                    .Name("ashlar_rpcs_total")
                    .Help("Calls of engines that were answered, by method and status")
                    .Register(registry)),
      lookup_seconds_(prometheus::BuildHistogram()
                          .Name("ashlar_lookup_duration_seconds")
                          .Help("From the arrival of a look-up to its answer, without the landing behind it")
                          .Register(registry)
                          .Add({}, kCallSeconds)),
      connections_refused_(prometheus::BuildCounter()
                               .Name("ashlar_connections_refused_total")
                               .Help("RPC connections beyond the number that their user may have")
                               .Register(registry)
                               .Add({})) {
  auto& family = prometheus::BuildHistogram()
                     .Name("ashlar_rpc_duration_seconds")
                     .Help("From the arrival of a call to its last answer, which is a landing's end where there is one")
                     .Register(registry);
  for (size_t i = 0; i < kCacheCalls.size(); ++i) {
    seconds_[i] = &family.Add({{"method", std::string(kCacheCalls[i].name)}}, kCallSeconds);
  }
}

void CallMetrics::Finished(CacheCall call, absl::StatusCode code, double seconds) {
  seconds_[static_cast<size_t>(call)]->Observe(seconds);
  finished_.Add({{"method", std::string(RowOf(call).name)}, {"code", absl::StatusCodeToString(code)}}).Increment();
}

}  // namespace ashlar::daemon
