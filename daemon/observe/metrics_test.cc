// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/observe/http_endpoint.h"
#include "daemon/testing/http_peer.h"
#include "proto/cache_calls.h"

namespace ashlar::daemon {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(MetricsTest, AlertsCountFromZero) {
  // Prometheus computes increases between two samples, so it misses the increase of a counter that starts at 1.
  Metrics metrics({"blue"});
  Levels levels;
  levels.tiers[TierKind::kDram] = {{.capacity_bytes = 1000, .used_bytes = 300, .held_bytes = 400}};
  levels.tiers[TierKind::kSsd] = levels.tiers[TierKind::kDram];
  levels.cluster.refusals = {{"expired", 0}};
  metrics.Set(levels);
  const std::string text = metrics.Text(TenantLabel::kNamed);
  for (const char* line :
       {"\nashlar_tier_errors_total{tenant=\"blue\",tier=\"dram\"} 0\n",
        "\nashlar_tier_errors_total{tenant=\"blue\",tier=\"ssd\"} 0\n",
        "\nashlar_checksum_failures_total{tenant=\"blue\"} 0\n",
        "\nashlar_scrub_corrupt_copies_total{tier=\"ssd\"} 0\n",
        "\nashlar_allocation_failures_total{tenant=\"blue\"} 0\n",
        "\nashlar_peers_rejected_total{reason=\"expired\"} 0\n", "\nashlar_queue_rejected_total{queue=\"workers\"} 0\n",
        "\nashlar_transport_requests_rejected_total 0\n", "\nashlar_ssd_quarantined_databases_total 0\n",
        "\nashlar_prefetched_objects_total{outcome=\"late\",tenant=\"blue\"} 0\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  for (const CacheCallRow& call : kCacheCalls) {
    for (const char* code : {"INTERNAL", "UNKNOWN", "DATA_LOSS"}) {
      EXPECT_THAT(text,
                  HasSubstr(absl::StrCat("\nashlar_rpcs_total{code=\"", code, "\",method=\"", call.name, "\"} 0\n")));
    }
  }
  EXPECT_THAT(text, Not(HasSubstr("tier=\"hbm\"} 0\nashlar_tier"))) << "no tier that is not there";
}

TEST(MetricsTest, LongestTaskIsThatSinceTheStart) {
  Metrics metrics({"blue"});
  const auto taken = [](storage::Nanos elapsed, storage::Nanos cpu) {
    EventLoop::TurnTimes times;
    times.elapsed.Add(elapsed);
    times.cpu.Add(cpu);
    return times;
  };
  metrics.TurnsTaken(taken(2'000'000, 500'000));
  metrics.TurnsTaken(taken(1'000'000, 750'000));
  const std::string text = metrics.Text(TenantLabel::kNamed);
  for (const char* line :
       {"\nashlar_metadata_task_longest_seconds 0.002\n", "\nashlar_metadata_task_longest_cpu_seconds 0.00075\n",
        "\nashlar_metadata_task_duration_seconds_bucket{le=\"0.0005\"} 0\n",
        "\nashlar_metadata_task_cpu_seconds_bucket{le=\"0.0005\"} 1\n",
        "\nashlar_metadata_task_cpu_seconds_count 2\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(MetricsTest, ALookupEndsWithItsAnswerNotWithItsLanding) {
  Metrics metrics({"blue"});
  metrics.calls().LookedUp(0.0005);
  metrics.calls().Finished(CacheCall::kLookupAndLand, absl::StatusCode::kOk, 0.5);
  const std::string text = metrics.Text(TenantLabel::kNamed);
  EXPECT_THAT(text, HasSubstr("\nashlar_lookup_duration_seconds_bucket{le=\"0.001\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("\nashlar_rpc_duration_seconds_bucket{method=\"LookupAndLand\",le=\"0.1\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("\nashlar_rpcs_total{code=\"OK\",method=\"LookupAndLand\"} 1\n"));
}

TEST(MetricsTest, SeparatePools) {
  Metrics metrics({"blue"});
  Levels levels;
  levels.pools[{TierKind::kDram, {0, storage::PoolKind::kPrivate}}] = {.used_bytes = 300};
  metrics.Set(levels);
  EXPECT_THAT(metrics.Text(TenantLabel::kNamed),
              HasSubstr("\nashlar_pool_used_bytes{pool=\"private\",tenant=\"blue\",tier=\"dram\"} 300\n"));
}

TEST(MetricsTest, ReportCertificateExpiry) {
  Metrics metrics({"blue"});
  Levels levels;
  levels.cluster.certificate_expiry = 1900000000;
  levels.cluster.certificate_seconds = 86400;
  levels.cluster.etcd_certificate_expiry = 1800000000;
  levels.cluster.etcd_certificate_seconds = 3600;
  metrics.Set(levels);
  const std::string text = metrics.Text(TenantLabel::kNamed);
  EXPECT_THAT(text, HasSubstr("\nashlar_certificate_expiry_timestamp_seconds{use=\"peers\"} 1900000000\n"));
  EXPECT_THAT(text, HasSubstr("\nashlar_certificate_expiry_timestamp_seconds{use=\"etcd\"} 1800000000\n"));
  EXPECT_THAT(text, HasSubstr("\nashlar_certificate_lifetime_seconds{use=\"peers\"} 86400\n"));
  EXPECT_THAT(text, HasSubstr("\nashlar_certificate_lifetime_seconds{use=\"etcd\"} 3600\n"));
}

TEST(HttpEndpointTest, ReadyzReportsReason) {
  const Metrics metrics({"blue"});
  v1::Config config;
  config.mutable_listen()->set_metrics_address("127.0.0.1:0");
  std::string why = kRdmaFallback;
  const auto http =
      HttpEndpoint::Start(config, metrics, {.alive = [] { return true; }, .unready = [&] { return why; }});
  ASSERT_TRUE(http.ok()) << http.status();
  const std::string refused = HttpPeer((*http)->port()).Ask("/readyz");
  EXPECT_THAT(refused, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(refused, EndsWith(absl::StrCat(kRdmaFallback, "\n")));
  why = "";
  EXPECT_THAT(HttpPeer((*http)->port()).Ask("/readyz"), EndsWith("\nready\n"));
}

}  // namespace
}  // namespace ashlar::daemon
