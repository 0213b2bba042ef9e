// SPDX-License-Identifier: Apache-2.0
// The fabric's state follows the transport that carries a link, which the test's own UCX reports.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"

namespace ashlar::daemon {
namespace {

// Sends nothing. The test controls links, events and lanes.
class ScriptedUcx final : public Ucx {
 public:
  struct Script {
    bool has_rdma = true;
    std::string lanes;
    LinkEvents events;
    std::vector<std::unique_ptr<Link>> links;
  };
  explicit ScriptedUcx(Script& script) : script_(script) {}

  HostPort address() const override { return {"127.0.0.1", 1}; }
  const std::vector<UcxSetting>& settings() const override { return settings_; }
  bool has_rdma() const override { return script_.has_rdma; }
  absl::StatusOr<Link*> Connect(const HostPort& peer) override {
    auto link = std::make_unique<Link>();
    link->id = script_.links.size() + 1;
    link->peer = peer.host;
    return script_.links.emplace_back(std::move(link)).get();
  }
  void Send(Link&, const Message&, ConstSpans, std::function<void(absl::Status)> sent) override {
    sent(absl::OkStatus());
  }
  void SendText(Link&, const Message&, std::string) override {}
  void Close(Link& link) override { script_.events.closed(link); }
  std::string Lanes(Link&) const override { return script_.lanes; }
  bool Progress() override { return false; }
  bool Arm() override { return true; }
  int event() const override { return -1; }

 private:
  Script& script_;
  std::vector<UcxSetting> settings_;
};

class SlowFabricTest : public testing::Test {
 protected:
  void StartOne(bool expects) {
    TransportSurroundings surroundings = TransportSurroundings::OfThisProcess();
    surroundings.open = [this](const TransportOptions&, LinkEvents events) -> absl::StatusOr<std::unique_ptr<Ucx>> {
      script_.events = std::move(events);
      return std::make_unique<ScriptedUcx>(script_);
    };
    transport_ = *Transport::Start({.expect_rdma = expects}, std::move(surroundings), [] {});
  }
  // Asks a peer for bytes, makes it answer over a new link with these lanes, and returns the link.
  Link& Reach(const std::string& lanes) {
    script_.lanes = lanes;
    transport_->Fetch({"10.0.0.2", 7}, {1, {}}, 0, {target_}, 0, [](const absl::Status&) {});
    transport_->Turn();
    Link& link = *script_.links.back();
    script_.events.received(&link, EncodeMessage({.kind = MessageKind::kPong}), {});
    return link;
  }
  void Lose(Link& link) {
    script_.events.lost(link, absl::UnavailableError("the cable"));
    script_.events.closed(link);
    transport_->Turn();
  }
  bool slow() const { return transport_->stats().rdma_fallback; }

  ScriptedUcx::Script script_;
  std::vector<std::byte> target_ = std::vector<std::byte>(16);
  std::unique_ptr<Transport> transport_;
};

TEST_F(SlowFabricTest, ARecoveredFabricIsNotSlow) {
  StartOne(true);
  EXPECT_FALSE(slow());
  Link& by_tcp = Reach("tcp/eth0");
  EXPECT_TRUE(slow());
  Lose(by_tcp);
  EXPECT_TRUE(slow()) << "nothing says yet that it is better";
  Link& by_card = Reach("rc_mlx5/mlx5_0:1");
  EXPECT_FALSE(slow());
  Lose(by_card);
  Reach("tcp/eth0");
  EXPECT_TRUE(slow());
}

TEST_F(SlowFabricTest, AnErasedPeerIsNotSlow) {
  StartOne(true);
  Lose(Reach("tcp/eth0"));
  transport_->KeepPeers({});
  transport_->Turn();
  EXPECT_FALSE(slow());
}

TEST_F(SlowFabricTest, AnAcceptedConnectionCountsWhileItExists) {
  StartOne(true);
  script_.lanes = "tcp/eth0";
  Link link;
  link.id = 77;
  link.accepted = true;
  script_.events.accepted(link);
  script_.events.received(&link, EncodeMessage({.kind = MessageKind::kPing}), {});
  EXPECT_TRUE(slow());
  Lose(link);
  EXPECT_FALSE(slow());
}

TEST_F(SlowFabricTest, IsReportedOnlyIfConfigured) {
  StartOne(false);
  Reach("tcp/eth0");
  EXPECT_FALSE(slow());
  script_.has_rdma = false;
  StartOne(true);
  EXPECT_TRUE(slow()) << "this node has no RDMA";
}

}  // namespace
}  // namespace ashlar::daemon
