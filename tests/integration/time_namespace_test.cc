// SPDX-License-Identifier: Apache-2.0
// An engine in another time namespace than the daemon.
#include "tests/integration/time_namespace.h"

#include <gtest/gtest.h>

#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"

namespace ashlar::integration {
namespace {

class TimeNamespaces : public testing::TestWithParam<int64_t> {};

TEST_P(TimeNamespaces, MayDifferBetweenDaemonAndEngine) {
  if (!MayMakeTimeNamespaces()) GTEST_SKIP() << "this machine does not let this user make time namespaces";
  DaemonProcess daemon;
  EngineProcess engine(daemon.client_options(), {"publish", "1", "2", "50"}, {.clock_ahead_seconds = GetParam()});
  EXPECT_EQ(engine.ReadLine(), "published");
}

// Behind by more than the limit of a call, so that all of its deadlines would have passed. The machine must have run
// that long.
INSTANTIATE_TEST_SUITE_P(Seconds, TimeNamespaces, testing::Values(-60, 1'000'000));

}  // namespace
}  // namespace ashlar::integration
