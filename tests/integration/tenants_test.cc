// Nothing crosses tenants: not by key, not by lease, not by descriptor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/strings/escaping.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::EndsWith;

constexpr uint32_t kOtherUser = 65531, kStranger = 65533;

class Tenants : public testing::Test {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
    daemon_ = std::make_unique<DaemonProcess>(
        DaemonOptions{.dram = "64MiB",
                      .arena = "4MiB",
                      .tenants = "tenants:\n"
                                 "  - {name: alpha, uids: [0], dram_bytes: 32MiB}\n"
                                 "  - {name: beta, uids: [65531], dram_bytes: 16MiB}\n"});
    engine_ = std::make_unique<TestEngine>(daemon_->client_options());
    engine_->PublishPrompt(prompt_);
  }

  std::string Other(const std::string& command, const std::string& lease = "", uint32_t uid = kOtherUser) {
    EngineProcess other(daemon_->client_options(), {command, "6", "3", "60", lease}, {.uid = uid});
    return other.ReadLine();
  }

  const std::vector<Tokens> prompt_ = MakePrompt(6, 3, 60);
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<TestEngine> engine_;
};

TEST_F(Tenants, SeeNothingOfEachOther) {
  EXPECT_EQ(engine_->client().tenant(), "alpha");
  const Match match = engine_->Lookup(prompt_);
  ASSERT_TRUE(match.segments()[1].hit());
  EXPECT_THAT(Other("match"), EndsWith("never_seen never_seen never_seen"));
  EXPECT_EQ(Other("attach", absl::BytesToHexString(match.lease())), "ok lease_lost lease_lost lease_lost");
  EXPECT_EQ(Other("attach", absl::BytesToHexString(match.lease()), 0), "ok none none none");  // the same tenant may
  EXPECT_EQ(Other("reserve"), "reserved granted granted granted");
}

TEST_F(Tenants, GetOnlyTheirOwnArenas) {
  EXPECT_EQ(Other("arenas"), "arenas 0");
  EXPECT_NE(Other("arenas", "", 0), "arenas 0");
}

TEST_F(Tenants, AUserOfNoTenantIsRefused) {
  EXPECT_EQ(Other("connect", "", kStranger), "PERMISSION_DENIED");
  EXPECT_EQ(Other("connect"), "OK");
}

}  // namespace
}  // namespace ashlar::integration
