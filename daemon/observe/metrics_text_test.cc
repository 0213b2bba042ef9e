// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/metrics_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class MetricsTextTest : public ::testing::Test {
 protected:
  MetricsTextTest() {
    auto& hits = prometheus::BuildCounter().Name("hits_total").Help("Hits").Register(registry_);
    hits.Add({{"tenant", "blue"}, {"tier", "dram"}}).Increment(3);
    hits.Add({{"tenant", "green"}, {"tier", "dram"}}).Increment(4);
    hits.Add({{"tenant", "green"}, {"tier", "ssd"}}).Increment(5);
    auto& used = prometheus::BuildGauge().Name("used_bytes").Help("Used").Register(registry_);
    used.Add({{"tenant", "blue"}}).Set(10);
    used.Add({{"tenant", "green"}}).Set(20);
    auto& ages = prometheus::BuildHistogram().Name("age_seconds").Help("Ages").Register(registry_);
    const prometheus::Histogram::BucketBoundaries bounds = {1, 2};
    ages.Add({{"tenant", "blue"}}, bounds).Observe(0.5);
    auto& green = ages.Add({{"tenant", "green"}}, bounds);
    green.Observe(1.5);
    green.Observe(9);
    auto& queue = prometheus::BuildGauge().Name("queue_depth").Help("Queue").Register(registry_);
    queue.Add({{"queue", "disk"}}).Set(7);
    queue.Add({{"queue", "workers"}}).Set(8);
  }

  std::string Text(TenantLabel tenants) { return MetricsText(registry_.Collect(), tenants); }

  prometheus::Registry registry_;
};

TEST_F(MetricsTextTest, NamesTenantsIfPermitted) {
  const std::string text = Text(TenantLabel::kNamed);
  for (const char* line : {"hits_total{tenant=\"blue\",tier=\"dram\"} 3\n", "used_bytes{tenant=\"green\"} 20\n",
                           "age_seconds_count{tenant=\"green\"} 2\n", "queue_depth{queue=\"disk\"} 7\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(MetricsTextTest, SumsTenantsIfNamesAreNotPermitted) {
  const std::string text = Text(TenantLabel::kSummed);
  for (const char* line : {"\nhits_total{tier=\"dram\"} 7\n", "\nhits_total{tier=\"ssd\"} 5\n", "\nused_bytes 30\n",
                           "\nage_seconds_count 3\n", "\nage_seconds_sum 11\n", "\nage_seconds_bucket{le=\"1\"} 1\n",
                           "\nage_seconds_bucket{le=\"2\"} 2\n", "\nage_seconds_bucket{le=\"+Inf\"} 3\n",
                           "\nqueue_depth{queue=\"disk\"} 7\n", "\nqueue_depth{queue=\"workers\"} 8\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  for (const char* secret : {"tenant", "blue", "green"}) EXPECT_THAT(text, Not(HasSubstr(secret)));
}

}  // namespace
}  // namespace ashlar::daemon
