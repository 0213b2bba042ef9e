// SPDX-License-Identifier: Apache-2.0
// Daemon and engine in separate PID namespaces, as in two containers: neither can see the other's PID.
#include "tests/integration/pid_namespace.h"

#include <gtest/gtest.h>

#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"

namespace ashlar::integration {
namespace {

class PidNamespaces : public testing::Test {
 protected:
  void SetUp() override {
    if (!MayMakePidNamespaces()) GTEST_SKIP() << "this machine does not let this user make PID namespaces";
  }
};

TEST_F(PidNamespaces, TheDaemonsDeathStillResolvesALanding) {
  DaemonProcess daemon({.own_pid_namespace = true});
  EngineProcess engine(daemon.client_options(), {"quiesce", "1", "2", "50"}, {.own_pid_namespace = true});
  ASSERT_EQ(engine.ReadLine(), "matched in process 1");
  daemon.Freeze();
  engine.GoOn();
  ASSERT_EQ(engine.ReadLine(), "unresolved");
  daemon.Kill();
  engine.GoOn();
  EXPECT_EQ(engine.ReadLine(), "quiesced");
}

TEST_F(PidNamespaces, AnEnginesDeathStillEndsItsSession) {
  DaemonProcess daemon({.own_pid_namespace = true});
  EngineProcess engine(daemon.client_options(), {"match", "1", "2", "50"}, {.own_pid_namespace = true});
  ASSERT_NE(engine.ReadLine(), "");
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_sessions") == 1; }));
  engine.Kill();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_sessions") == 0; }));
}

}  // namespace
}  // namespace ashlar::integration
