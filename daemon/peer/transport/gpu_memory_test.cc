// SPDX-License-Identifier: Apache-2.0
// Transfers from and to GPU memory, over a fake connection: the tests inspect what this node sends.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <utility>
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
  void SendText(Link&, const Message& message, std::string) override {
    sent_.push_back(message.kind);
    ticket_ = message.from;
  }
  void Close(Link&) override {}
  std::string Lanes(Link&) const override { return "none"; }
  bool Reaches(MemoryType) const override { return true; }
  MemoryType TypeOf(const std::byte*) const override { return MemoryType::kCuda; }
  // A message with data for the latest request.
  void Bring(std::span<const std::byte> data) {
    events_.received(&link_, EncodeMessage({.kind = MessageKind::kData, .to = ticket_}), data);
  }
  bool Progress() override { return false; }
  bool Arm() override { return false; }
  int event() const override { return -1; }

 private:
  const LinkEvents events_;
  std::vector<MessageKind>& sent_;
  const std::vector<UcxSetting> settings_;
  Grant ticket_;
  Link link_;
};

class GpuMemoryTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Transport>> Start() {
    TransportSurroundings surroundings = TransportSurroundings::OfThisProcess();
    surroundings.open = [&](const TransportOptions&, LinkEvents events) -> absl::StatusOr<std::unique_ptr<Ucx>> {
      auto ucx = std::make_unique<GpuUcx>(std::move(events), sent);
      ucx_ = ucx.get();
      return ucx;
    };
    return Transport::Start({}, surroundings, [] {});
  }
  std::vector<MessageKind> sent;
  GpuUcx* ucx_ = nullptr;
};

// The pieces of a message are copied to the targets by the method with which the memory was registered.
TEST_F(GpuMemoryTest, MessagesDeliverToReachableGpuMemory) {
  auto transport = Start();
  ASSERT_TRUE(transport.ok()) << transport.status();
  std::vector<std::byte> memory(1000), data(600);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i % 251);
  std::vector<size_t> copied;
  (*transport)
      ->Register(memory.data(), memory.size(), MemoryType::kCuda, [&](std::byte* to, std::span<const std::byte> from) {
        copied.push_back(from.size());
        std::ranges::copy(from, to);
      });
  Outcome fetched, beside;
  const std::span<std::byte> all(memory);
  (*transport)->Fetch({"peer", 1}, {5, {1}}, 0, {all.subspan(100, 200), all.subspan(500, 400)}, 0, fetched.done());
  (*transport)->Turn();
  ucx_->Bring(data);
  EXPECT_EQ(fetched.Wait(), absl::OkStatus());
  EXPECT_EQ(copied, (std::vector<size_t>{200, 400}));
  EXPECT_TRUE(std::equal(data.begin(), data.begin() + 200, memory.begin() + 100));
  EXPECT_TRUE(std::equal(data.begin() + 200, data.end(), memory.begin() + 500));
  // Memory that is partly another owner's is not written.
  (*transport)->Fetch({"peer", 1}, {5, {1}}, 0, {all.subspan(0, 100), data}, 0, beside.done());
  (*transport)->Turn();
  EXPECT_EQ(beside.Wait(), absl::FailedPreconditionError("this memory can only be filled by RDMA reads"));
}

TEST_F(GpuMemoryTest, MessagesDoNotDeliverToUnreachableGpuMemory) {
  auto transport = Start();
  ASSERT_TRUE(transport.ok()) << transport.status();
  EXPECT_TRUE((*transport)->Reaches(MemoryType::kCuda));
  std::vector<std::byte> memory(1000);
  Outcome fetched;
  (*transport)->Fetch({"peer", 1}, {5, {1}}, 0, {memory}, 0, fetched.done());
  (*transport)->Turn();
  EXPECT_EQ(fetched.Wait(), absl::FailedPreconditionError("this memory can only be filled by RDMA reads"));
  EXPECT_EQ(std::count(sent.begin(), sent.end(), MessageKind::kFetch), 0);
}

// Also if UCX does not support GPUs.
TEST(GpuTransportTest, GpuTransportServesHostMemory) {
  std::atomic<int> entered{0};
  const TransportOptions options{.reads = RemoteReads::kNever, .enter_gpu = [&] { ++entered; }};
  std::vector<std::byte> memory(100'000, std::byte{7}), target(memory.size());  // outlives the transports
  auto holder = Transport::Start(options), reader = Transport::Start(options);
  ASSERT_TRUE(holder.ok()) << holder.status();
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto bytes = std::make_shared<HeldBytes>(Spans{memory});
  const Grant grant = (*holder)->Allow(memory.size(), bytes);
  Outcome outcome;
  (*reader)->Fetch((*holder)->address(), grant, 0, {target}, 0, outcome.done());
  EXPECT_EQ(outcome.Wait(), absl::OkStatus());
  EXPECT_EQ(target, memory);
  EXPECT_EQ(entered, 4) << "the threads that start them, and their own";
  const std::vector<UcxSetting> settings = (*holder)->settings();
  EXPECT_TRUE(std::ranges::any_of(settings, [](const UcxSetting& setting) {
    return setting.name == "UCX_TLS" && setting.value == "tcp,self,cuda_copy";
  }));
}

}  // namespace
}  // namespace ashlar::daemon
