// SPDX-License-Identifier: Apache-2.0
// Hedged reads: if a holder is slow, a second holder is asked for the same bytes, and the first answer is used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <list>
#include <random>
#include <type_traits>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/manual_clock.h"

namespace ashlar::daemon {
namespace {

using std::chrono::milliseconds;
using storage::Query;
using storage::TestPages;

// Blocks its transport's thread, and so everything that the node sends.
class Stalling final : public GrantedBytes {
 public:
  explicit Stalling(milliseconds time) : time_(time) {}
  void Resolve(uint64_t, uint64_t, std::function<void(absl::StatusOr<Spans>)> answer) override {
    std::this_thread::sleep_for(time_);
    answer(absl::NotFoundError("none"));
  }

 private:
  const milliseconds time_;
};

// Blocks a node's transport during its lifetime.
class Frozen {
 public:
  Frozen(Transport& outside, PeerNode& node) {
    const Grant grant = node.transport->Allow(sizeof target_, granted_);
    constexpr int64_t kLong = 600'000'000'000;
    outside.Fetch(node.transport->address(), grant, 0, {{target_, sizeof target_}}, kLong,
                  [this](const absl::Status&) { ended_.set_value(); });
    granted_->began.get_future().wait();
  }
  ~Frozen() {
    granted_->thaw.set_value();
    ended_.get_future().wait();
  }

 private:
  struct Held final : GrantedBytes {
    void Resolve(uint64_t, uint64_t, std::function<void(absl::StatusOr<Spans>)> answer) override {
      began.set_value();
      thaw.get_future().wait();
      answer(absl::NotFoundError("none"));
    }
    std::promise<void> began, thaw;
  };

  std::byte target_[64];
  const std::shared_ptr<Held> granted_ = std::make_shared<Held>();
  std::promise<void> ended_;
};

// Remote objects of one node, read piece by piece. The test advances their clock, and decides when to hedge.
class Reader {
 public:
  static constexpr size_t kPiece = 4;  // extents

  explicit Reader(PeerNode& node) : node_(node) {}
  ~Reader() {
    Do([this] {
      for (const storage::RemoteCopyId copy : open_) objects.Release(copy);
      opener_.Flush();
    });
  }

  // In order with all other work of the node for its tenant.
  template <typename Work>
  std::invoke_result_t<Work> Do(Work work) {
    const auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Work>()>>(std::move(work));
    node_.loop.PostCompletion(0, [task] { (*task)(); });
    return task->get_future().get();
  }
  storage::RemoteCopyId Open(PeerNode& holder, const ObjectHeader& plan, const std::vector<PeerNode*>& others = {}) {
    std::promise<storage::RemoteCopyId> copy;
    Do([&] {
      opener_.Open(0, holder.directory.member, {{plan.key, plan.shard}}, [&](Opener::Opened opened) {
        std::vector<std::shared_ptr<const Member>> members;
        for (const PeerNode* other : others) members.push_back(other->directory.member);
        copy.set_value(objects.Add(0, *std::move(opened.front()), std::move(members)));
      });
    });
    open_.push_back(copy.get_future().get());
    return open_.back();
  }
  // Refused if not valid.
  std::future<absl::Status> Read(storage::RemoteCopyId copy, size_t piece) {
    auto& memory = memory_.emplace_back(kPiece * limits::kExtentBytes);
    std::vector<std::byte*> targets;
    for (size_t i = 0; i < kPiece; ++i) targets.push_back(memory.data() + i * limits::kExtentBytes);
    const auto done = std::make_shared<std::promise<absl::Status>>();
    const bool begun = Do([&] {
      return objects.Read(copy, piece * kPiece, targets, nullptr,
                          [done](const absl::Status& s) { done->set_value(s); });
    });
    return begun ? done->get_future() : std::future<absl::Status>();
  }
  // Hedges late reads: opens a second holder, or asks it for the piece if it is already open.
  void Hedge(storage::Nanos after = 1'000'000'000) {
    Do([this, after] {
      clock.Advance(after);
      objects.Flush();
    });
  }
  // Waits until the second holder has answered.
  void OpenSecond(PeerNode& second) {
    Hedge();
    while (second.OnLoop([&] { return second.peers.stats().holder.leases; }) == 0) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    Do([] {});
  }
  uint64_t hedged() {
    return Do([this] { return objects.stats().hedged; });
  }

 private:
  static constexpr storage::Nanos kNever = 600'000'000'000;
  PeerNode& node_;

 public:
  storage::ManualClock clock;

 private:
  PeerRates rates_;
  Opener opener_{node_.loop, clock, node_.directory, node_, rates_, {"default"}};

 public:
  RemoteObjects objects{node_.loop, clock,  *node_.transport,
                        opener_,    rates_, {.least_patience = kNever, .most_patience = kNever}};

 private:
  std::list<std::vector<std::byte>> memory_;
  std::vector<storage::RemoteCopyId> open_;
};

// Grants all renewals, and records them.
class Renewals final : public PeerAsker {
 public:
  bool Shares(const Member&, const std::string&) const override { return true; }
  void Open(const Member&, const std::string&, PeerOpen, PeerCalls::Done<std::vector<PeerOpened>>) override {}
  void Renew(const Member& member, PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) override {
    asked.push_back(member.node);
    done(std::vector<uint32_t>(renew.leases.size(), renew.lease_ms));
  }
  void Offer(const Member&, const std::string&, PeerOffer, PeerCalls::Done<std::vector<TakeOutcome>>) override {}
  void Close(const Member&, std::vector<PeerLease>, std::function<void(absl::Status)>) override {}

  std::vector<std::string> asked;
};

class HedgeTest : public ::testing::Test {
 protected:
  void Stall(PeerNode& node, milliseconds time) {
    const Grant grant = node.transport->Allow(64, std::make_shared<Stalling>(time));
    outside_->Fetch(node.transport->address(), grant, 0, {{target_, sizeof target_}}, 0, [](const absl::Status&) {});
  }
  // Returns the time of the landing.
  static storage::Nanos Land(PeerNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
    const storage::Nanos began = node.clock.Now();
    const storage::Match match = node.Lookup({&query, 1});
    EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
    const TestPages pages(TestPages::Holding(plan.tokens + 100));
    EXPECT_THAT(node.Land(match.lease, TestTarget(pages, {{0, 100}})), ::testing::ElementsAre(MissReason::kNone));
    const storage::Nanos took = node.clock.Now() - began;
    EXPECT_LT(LandingError(pages, plan, text, 100), 1e-4);
    node.Release(match.lease);
    return took;
  }
  // An object of two nodes, the first of which hung for a moment: the reader has it open at both.
  storage::RemoteCopyId OpenBoth(Reader& reader, PeerNode& first, PeerNode& second) {
    const ObjectHeader plan = storage::TestPlan(1, 8000);
    for (PeerNode* node : {&first, &second}) node->Publish(plan, 1);
    const storage::RemoteCopyId copy = reader.Open(first, plan, {&second});
    std::future<absl::Status> piece;
    {
      const Frozen frozen(*outside_, first);
      piece = reader.Read(copy, 0);
      reader.OpenSecond(second);
    }
    EXPECT_TRUE(piece.get().ok());
    return copy;
  }
  static RemoteObjects::Stats StatsOf(PeerNode& node) {
    return node.OnLoop([&] { return node.peers.stats().objects; });
  }
  static void AwaitNothingOpen(PeerNode& node) {
    const auto open = [&] {
      const PeersStats stats = node.OnLoop([&] { return node.peers.stats(); });
      return stats.objects.copies + stats.objects.reading + stats.holder.leases;
    };
    for (int i = 0; i < 10'000 && open() > 0; ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(open(), 0u);
  }

  std::byte target_[64];
  const std::unique_ptr<Transport> outside_ = *Transport::Start({.listen = {"127.0.0.1", 0}});
  TestCluster cluster_;
};

TEST_F(HedgeTest, ASlowHolderIsHedged) {
  PeersOptions options = PeerNode::All();
  options.objects.least_patience = options.objects.most_patience = 20'000'000'000;
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b", 256, options);
  const ObjectHeader plan = storage::TestPlan(1, 8000);
  a.Publish(plan, 1);
  Land(c, plan, 1);
  Stall(a, milliseconds(3000));
  std::this_thread::sleep_for(milliseconds(100));  // until it has begun
  EXPECT_LT(Land(b, plan, 1), 2'000'000'000);
  const RemoteObjects::Stats stats = StatsOf(b);
  EXPECT_GE(stats.hedges_won, 1u);
  EXPECT_GE(stats.hedged, stats.hedges_won);
  EXPECT_EQ(stats.failed_pieces, 0u);
  for (PeerNode* node : {&a, &b, &c}) AwaitNothingOpen(*node);
}

TEST_F(HedgeTest, AFastHolderIsNotHedged) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  const ObjectHeader plan = storage::TestPlan(1, 2000);
  a.Publish(plan, 1);
  Land(c, plan, 1);
  Land(b, plan, 1);
  EXPECT_EQ(StatsOf(b).moved, 0u);
}

TEST_F(HedgeTest, WaitsWithoutSecondHolder) {
  PeersOptions options = PeerNode::All();
  options.objects.least_patience = options.objects.most_patience = 20'000'000'000;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options);
  const ObjectHeader plan = storage::TestPlan(1, 2000);
  a.Publish(plan, 1);
  Stall(a, milliseconds(500));
  Land(b, plan, 1);
  EXPECT_EQ(StatsOf(b).hedged, 0u);
}

// Both holders stall sometimes: whichever wins and whatever is cancelled, the bytes are right and nothing leaks.
TEST_F(HedgeTest, BytesAreRightForEitherWinner) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  PeersOptions options = PeerNode::All();
  options.objects.least_hedge = 10'000'000;
  options.objects.hedge = 1;
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b", 64, options);
  for (uint64_t text = 1; text <= 12; ++text) {
    const ObjectHeader plan = storage::TestPlan(text, 500 + random() % 6000);
    a.Publish(plan, text);
    c.Publish(plan, text);
    PeerNode& slow = random() % 2 == 0 ? a : c;
    Stall(slow, milliseconds(random() % 60));
    Land(b, plan, text);
  }
  EXPECT_EQ(StatsOf(b).failed_pieces, 0u);
  for (PeerNode* node : {&a, &b, &c}) AwaitNothingOpen(*node);
}

// The first holder stalls, recovers, and stalls again. The second one is open by then.
TEST_F(HedgeTest, AHolderThatStallsAgainIsHedgedAgain) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  Reader reader(b);
  const storage::RemoteCopyId copy = OpenBoth(reader, a, c);
  EXPECT_EQ(reader.hedged(), 0u);
  std::future<absl::Status> piece;
  {
    const Frozen frozen(*outside_, a);
    piece = reader.Read(copy, 1);
    reader.Hedge(10'000'000'000);  // the first piece took a second
    EXPECT_EQ(reader.hedged(), 1u);
    if (reader.hedged() > 0) piece.wait();
  }
  EXPECT_TRUE(piece.get().ok());
}

// The loser wrote into the same memory until it was cancelled, so wrong bytes may be its own.
TEST_F(HedgeTest, WrongBytesExcludeBothSenders) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  const ObjectHeader plan = storage::TestPlan(1, 8000);
  for (PeerNode* node : {&a, &c}) node->Publish(plan, 1);
  Reader reader(b);
  const storage::RemoteCopyId copy = reader.Open(a, plan, {&c});
  {
    const Frozen frozen(*outside_, a);
    std::future<absl::Status> piece = reader.Read(copy, 0);
    reader.OpenSecond(c);
    reader.Hedge();
    EXPECT_TRUE(piece.get().ok()) << "of the second holder";
  }
  reader.Do([&] { reader.objects.Damaged(copy); });
  for (PeerNode* node : {&a, &c}) {
    EXPECT_TRUE(reader.Do([&] { return reader.objects.Distrusts(*node->directory.member, plan.key); }));
  }
}

TEST_F(HedgeTest, ASecondHolderThatFailsIsReplacedByAThird) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), d(cluster_, "d"), b(cluster_, "b");
  const ObjectHeader plan = storage::TestPlan(1, 8000);
  for (PeerNode* node : {&a, &c, &d}) node->Publish(plan, 1);
  Reader reader(b);
  const storage::RemoteCopyId copy = reader.Open(a, plan, {&c, &d});
  std::vector<std::future<absl::Status>> pieces;
  {
    const Frozen frozen(*outside_, a);
    pieces.push_back(reader.Read(copy, 0));
    reader.OpenSecond(c);
    c.peers.PeerGone("b");  // ends its leases
    while (c.OnLoop([&] { return c.cache.stats().leases; }) > 0) std::this_thread::sleep_for(milliseconds(1));
    bool came = false;
    for (size_t piece = 1; piece < 8 && !came; ++piece) {
      pieces.push_back(reader.Read(copy, piece));
      for (int i = 0; i < 100 && !came; ++i) {
        reader.Hedge();
        came = pieces.back().wait_for(milliseconds(10)) == std::future_status::ready;
      }
    }
    // Not because the first holder was abandoned after a while.
    EXPECT_EQ(reader.Do([&] { return reader.objects.stats().hedges_won; }), 1u);
  }
  for (auto& piece : pieces) EXPECT_TRUE(piece.get().ok());
}

TEST_F(HedgeTest, BothHoldersLeasesAreRenewed) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  Reader reader(b);
  OpenBoth(reader, a, c);
  Renewals renewals;
  const auto tick = [&](storage::Nanos after) {
    renewals.asked.clear();
    reader.Do([&] {
      reader.clock.Advance(after);
      reader.objects.Tick(renewals);
    });
    b.OnLoop([] {});  // the answers have arrived
    return renewals.asked;
  };
  constexpr storage::Nanos kHalf = storage::Nanos{Opener::kLeaseMillis} * 500'000;
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(tick(kHalf), ::testing::UnorderedElementsAre("a", "c"));
    EXPECT_THAT(tick(0), ::testing::IsEmpty());
  }
}

TEST_F(HedgeTest, RequestsToAFrozenHolderAreBounded) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  std::vector<ObjectHeader> plans;
  for (uint64_t text = 1; text <= 4; ++text) plans.push_back(storage::TestPlan(text, 8000));
  for (uint64_t text = 1; text <= 3; ++text) a.Publish(plans[text - 1], text);
  c.Publish(plans[3], 4);
  Reader reader(b);
  std::vector<storage::RemoteCopyId> at_a;
  for (size_t i = 0; i < 3; ++i) at_a.push_back(reader.Open(a, plans[i]));
  const storage::RemoteCopyId at_c = reader.Open(c, plans[3]);
  std::vector<std::future<absl::Status>> pieces;
  {
    const Frozen frozen(*outside_, a);
    for (size_t i = 0; i < 16; ++i) pieces.push_back(reader.Read(at_a[i / 8], i % 8));
    EXPECT_FALSE(reader.Read(at_a[2], 0).valid());
    std::future<absl::Status> other = reader.Read(at_c, 0);
    ASSERT_TRUE(other.valid());
    EXPECT_TRUE(other.get().ok());
  }
  for (auto& piece : pieces) EXPECT_TRUE(piece.get().ok());
  EXPECT_TRUE(reader.Read(at_a[2], 0).get().ok());
}

// A prompt of one tenant, larger than 64 MiB, is in transfer from a frozen holder. Another tenant's prompt lands.
TEST_F(HedgeTest, AFrozenHolderDelaysNoOthers) {
  PeersOptions options = PeerNode::All();
  options.objects.least_patience = options.objects.most_patience = 600'000'000'000;
  PeerNode a(cluster_, "a", 512), c(cluster_, "c"), b(cluster_, "b", 512, options);
  std::vector<Query> prompt;
  uint64_t extents = 0;
  for (uint64_t text = 1; extents <= 256; ++text) {
    const ObjectHeader plan = storage::TestPlan(text, 8000);
    a.Publish(plan, text);
    prompt.push_back({.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens});
    extents += plan.Extents();
  }
  const ObjectHeader other = storage::TestPlan(1000, 2000);
  c.Publish(other, 1000);
  storage::Match match;
  std::future<storage::Nanos> landed;
  {
    const Frozen frozen(*outside_, a);
    match = b.Lookup(prompt);
    landed = std::async(std::launch::async, [&] { return Land(b, other, 1000); });
    EXPECT_EQ(landed.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    EXPECT_GT(StatsOf(b).reading, 0u);
  }
  landed.wait();
  b.Release(match.lease);
  for (PeerNode* node : {&a, &b, &c}) AwaitNothingOpen(*node);
}

}  // namespace
}  // namespace ashlar::daemon
