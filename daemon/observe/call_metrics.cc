// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/call_metrics.h"

#include <string>

namespace ashlar::daemon {

namespace {

// Internal errors, which the alert AshlarFailedCalls counts.
constexpr absl::StatusCode kOwnErrors[] = {absl::StatusCode::kInternal, absl::StatusCode::kUnknown,
                                           absl::StatusCode::kDataLoss};

}  // namespace

CallMetrics::CallMetrics(prometheus::Registry& registry)
    : finished_(prometheus::BuildCounter()
                    .Name("ashlar_rpcs_total")
                    .Help("Answered calls of engines, by method and status")
                    .Register(registry)),
      lookup_seconds_(prometheus::BuildHistogram()
                          .Name("ashlar_lookup_duration_seconds")
                          .Help("Time from the arrival of a lookup to its answer, without the landing")
                          .Register(registry)
                          .Add({}, kCallSeconds)) {
  auto& family = prometheus::BuildHistogram()
                     .Name("ashlar_rpc_duration_seconds")
                     .Help("Time from the arrival of a call to its last answer, including its landing")
                     .Register(registry);
  for (size_t i = 0; i < kCacheCalls.size(); ++i) {
    const std::string method(kCacheCalls[i].name);
    seconds_[i] = &family.Add({{"method", method}}, kCallSeconds);
    // Created at 0, because Prometheus sees no increase in a counter that starts at 1.
    for (const absl::StatusCode code : kOwnErrors) {
      finished_.Add({{"method", method}, {"code", absl::StatusCodeToString(code)}});
    }
  }
}

void CallMetrics::Finished(CacheCall call, absl::StatusCode code, double seconds) {
  seconds_[static_cast<size_t>(call)]->Observe(seconds);
  finished_.Add({{"method", std::string(RowOf(call).name)}, {"code", absl::StatusCodeToString(code)}}).Increment();
}

}  // namespace ashlar::daemon
