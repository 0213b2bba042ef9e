// Transfers whose memory is a GPU's, over a connection that is none: what leaves this node is what is looked at.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/peer/transport/ucx.h"

namespace ashlar::daemon {
namespace {

// All memory of this process is a GPU's.
class GpuUcx final : public Ucx {
 public:
  GpuUcx(LinkEvents events, std::vector<MessageKind>& sent) : events_(std::move(events)), sent_(sent) {}
  ~GpuUcx() override { events_.closed(link_); }

  HostPort address() const override { return {"127.0.0.1", 1}; }
  const std::vector<UcxSetting>& settings() const override { return settings_; }
  bool has_rdma() const override { return false; }
  absl::StatusOr<Link*> Connect(const HostPort&) override {
    link_.id = 1;
    return &link_;
  }
  void Send(Link&, const Message&, ConstSpans, std::function<void(absl::Status)> sent) override {
    sent(absl::OkStatus());
  }
  void SendText(Link&, const Message& message, std::string) override { sent_.push_back(message.kind); }
  void Close(Link&) override {}
  std::string Lanes(Link&) const override { return "none"; }
  bool Reaches(MemoryType) const override { return true; }
  MemoryType TypeOf(const std::byte*) const override { return MemoryType::kCuda; }
  bool Progress() override { return false; }
  bool Arm() override { return false; }
  int event() const override { return -1; }

 private:
  const LinkEvents events_;
  std::vector<MessageKind>& sent_;
  const std::vector<UcxSetting> settings_;
  Link link_;
};

TEST(GpuMemoryTest, MessagesBringNothingThereAndCarryWhatLiesThere) {
  std::vector<MessageKind> sent;
  TransportSurroundings surroundings = TransportSurroundings::OfThisProcess();
  surroundings.open = [&](const TransportOptions&, LinkEvents events) -> absl::StatusOr<std::unique_ptr<Ucx>> {
    return std::make_unique<GpuUcx>(std::move(events), sent);
  };
  auto transport = Transport::Start({}, surroundings, [] {});
  ASSERT_TRUE(transport.ok()) << transport.status();
  EXPECT_TRUE((*transport)->Reaches(MemoryType::kCuda));
  std::vector<std::byte> memory(1000);
  Outcome fetched, pushed;
  (*transport)->Fetch({"peer", 1}, {5, {1}}, 0, {memory}, 0, fetched.done());
  (*transport)->Turn();
  EXPECT_EQ(fetched.Wait(), absl::FailedPreconditionError("only a card that reads brings bytes to a GPU's memory"));
  EXPECT_EQ(std::count(sent.begin(), sent.end(), MessageKind::kFetch), 0);
  (*transport)->Push({"peer", 1}, {5, {1}}, 0, {memory}, 0, pushed.done());
  (*transport)->Turn();
  EXPECT_FALSE(pushed.IsThere());
  EXPECT_EQ(std::count(sent.begin(), sent.end(), MessageKind::kPush), 1);
}

}  // namespace
}  // namespace ashlar::daemon
