// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/erase/acknowledgements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/testing/manual_clock.h"

namespace ashlar::daemon {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr storage::Nanos kSecond = 1'000'000'000;

// Reports the given members and erasures, and does nothing else.
class SaidDirectory final : public Directory {
 public:
  std::vector<std::shared_ptr<const Member>> members;
  std::vector<ClusterErasure> erasures;

  void Say(const std::string& node, int64_t erased) {
    for (auto& member : members) {
      if (member->node != node) continue;
      member = std::make_shared<const Member>(Member{.node = node, .erased = erased});
      return;
    }
    members.push_back(std::make_shared<const Member>(Member{.node = node, .erased = erased}));
  }
  void Wish(int64_t revision) {
    ClusterErasure one{.tenant = "acme", .node = "here", .revision = revision};
    one.id.fill(static_cast<uint8_t>(revision));
    erasures.push_back(one);
  }

  bool Announce(const NamespaceId&, const Key&, const Holding&, double) override { return false; }
  void Withdraw(const NamespaceId&, const Key&, const TensorShard&) override {}
  size_t RemainingCapacity() const override { return 0; }
  bool WasDisplaced(const NamespaceId&, const Key&, const TensorShard&) const override { return false; }
  void Follow(const NamespaceId&) override {}
  void Unfollow(const NamespaceId&) override {}
  std::vector<Located> Locate(const NamespaceId&, std::span<const Key>) const override { return {}; }
  std::vector<uint64_t> Depths(const NamespaceId&, uint64_t, size_t) const override { return {}; }
  std::vector<uint64_t> SpanEnds(const NamespaceId&, uint64_t, uint64_t, size_t) const override { return {}; }
  void Erase(const ClusterErasure&, std::function<void(const absl::Status&)>) override {}
  std::vector<ClusterErasure> Erasures() const override { return erasures; }
  void Erased(int64_t) override {}
  bool BeingErased(const std::string&, const NamespaceId&) const override { return false; }
  std::vector<std::shared_ptr<const Member>> Members() const override { return members; }
  DirectoryHealth Health() const override { return {}; }
  DirectoryStats Stats() const override { return {}; }
};

class AcknowledgementsTest : public ::testing::Test {
 protected:
  AcknowledgementsTest() {
    for (const char* node : {"here", "second", "third"}) directory_.Say(node, 0);
  }
  // (count, seconds) of a side.
  static std::pair<uint64_t, double> Of(const PendingErasures& side) { return {side.count, side.oldest_seconds}; }
  using Side = std::pair<uint64_t, double>;

  SaidDirectory directory_;
  storage::ManualClock clock_;
  Acknowledgements acknowledgements_{directory_, clock_};
};

TEST_F(AcknowledgementsTest, NoWaitWithoutPendingErasures) {
  EXPECT_EQ(Of(acknowledgements_.Look().here), Side(0, 0));
  directory_.Wish(5);
  for (const char* node : {"here", "second", "third"}) directory_.Say(node, 5);
  const Acknowledgements::Waiting waiting = acknowledgements_.Look();
  EXPECT_EQ(Of(waiting.here), Side(0, 0));
  EXPECT_EQ(Of(waiting.elsewhere), Side(0, 0));
  EXPECT_THAT(waiting.nodes, IsEmpty());
}

TEST_F(AcknowledgementsTest, EachSideHasACountAndTheAgeOfItsOldest) {
  directory_.Wish(5);
  acknowledgements_.Look();
  clock_.Advance(10 * kSecond);
  directory_.Wish(6);
  directory_.Say("here", 5);
  acknowledgements_.Look();
  clock_.Advance(7 * kSecond);
  const Acknowledgements::Waiting waiting = acknowledgements_.Look();
  EXPECT_EQ(Of(waiting.here), Side(1, 7));
  EXPECT_EQ(Of(waiting.elsewhere), Side(2, 17));
  EXPECT_THAT(waiting.nodes, IsEmpty()) << "within the patience";
}

TEST_F(AcknowledgementsTest, LateNodesAreNamedUntilTheyAcknowledgeOrLeave) {
  directory_.Wish(5);
  directory_.Say("here", 5);
  acknowledgements_.Look();
  clock_.Advance(Acknowledgements::kPatience + kSecond);
  EXPECT_THAT(acknowledgements_.Look().nodes, ElementsAre("second", "third"));
  directory_.Say("third", 5);
  EXPECT_THAT(acknowledgements_.Look().nodes, ElementsAre("second"));
  directory_.members.resize(1);  // it has left: no node waits for it
  const Acknowledgements::Waiting waiting = acknowledgements_.Look();
  EXPECT_EQ(Of(waiting.elsewhere), Side(0, 0));
  EXPECT_THAT(waiting.nodes, IsEmpty());
  // If it returns and has not erased, the wait starts again.
  directory_.Say("second", 0);
  acknowledgements_.Look();
  clock_.Advance(kSecond);
  EXPECT_EQ(Of(acknowledgements_.Look().elsewhere), Side(1, 1));
}

TEST_F(AcknowledgementsTest, ANodeThatHasNotJoinedDoesNotWait) {
  directory_.members.clear();
  directory_.Wish(5);
  EXPECT_EQ(Of(acknowledgements_.Look().here), Side(0, 0));
}

}  // namespace
}  // namespace ashlar::daemon
