// SPDX-License-Identifier: Apache-2.0
// Remote reads: the reader reads bytes in place at their holder. UCX emulates the network cards in software.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/peer/transport/testing/raw_client.h"
#include "daemon/peer/transport/testing/reading.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kArea = Areas::kArea, kExtent = Areas::kExtent;
constexpr int64_t kShortSilence = 300'000'000;

std::vector<std::byte> Gather(const Spans& spans) {
  std::vector<std::byte> all;
  for (const auto& span : spans) all.insert(all.end(), span.begin(), span.end());
  return all;
}
void Fill(const Spans& spans, std::mt19937_64& random) {
  uint64_t state = random();
  for (const auto& span : spans) {
    for (std::byte& byte : span) {
      state = state * 6364136223846793005 + 1442695040888963407;
      byte = static_cast<std::byte>(state >> 56);
    }
  }
}

class LoanTest : public testing::Test {
 protected:
  LoanTest() { Begin({}); }
  ~LoanTest() override {
    if (HasFailure()) std::printf("seed %lu\n", static_cast<unsigned long>(seed_));
  }
  // The first fetch over a connection uses messages.
  void Begin(const TransportOptions& options) {
    holder_ = StartReading(options);
    asker_ = StartReading(options);
    areas_.RegisterAt(*holder_);
    std::byte one{};
    const Grant grant = holder_->Allow(1, std::make_shared<HeldBytes>(Spans{{&one, 1}}));
    std::byte got{};
    ASSERT_TRUE(Fetch({}, grant, 0, {{&got, 1}}).ok());
    ASSERT_EQ(asker_->stats().read_bytes, 0u);
    RevokeNow(*holder_, grant);
  }

  struct Granted {
    Spans spans;
    std::shared_ptr<HeldBytes> held;
    std::shared_ptr<const RemoteMemory> memory;
    Grant grant;
  };
  Granted Allow(size_t size, bool ordered = false, HeldBytes::How how = HeldBytes::How::kAtOnce) {
    Granted granted{.spans = areas_.Object(size, ordered, random_)};
    Fill(granted.spans, random_);
    granted.held = std::make_shared<HeldBytes>(granted.spans, how);
    granted.memory = std::make_shared<const RemoteMemory>(holder_->Describe(granted.spans));
    EXPECT_FALSE(granted.memory->arenas.empty());
    granted.grant = holder_->Allow(size, granted.held);
    return granted;
  }
  absl::Status Fetch(std::shared_ptr<const RemoteMemory> memory, const Grant& grant, uint64_t offset, Spans targets,
                     int64_t deadline = 0) {
    Outcome outcome;
    asker_->Fetch(holder_->address(), grant, offset, std::move(targets), deadline, outcome.done(), std::move(memory));
    return outcome.Wait();
  }
  // Borrows a whole grant of 1,000 bytes, with hand-written messages.
  static void Borrow(RawClient& client, const Granted& granted, uint64_t patience) {
    client.Message(EncodeMessage({.kind = MessageKind::kBorrow,
                                  .to = granted.grant,
                                  .from = {77, DrawSecret()},
                                  .length = 1000,
                                  .patience = patience}),
                   {});
  }
  // A loan is returned soon after the reader's end.
  void AwaitNoLoans() {
    WaitFor([&] {
      const TransportStats stats = holder_->stats();
      return stats.loans == 0 && stats.transfers == 0;
    });
  }

  const uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  Areas areas_{3}, own_{1};  // outlive the transports that register them
  std::unique_ptr<Transport> holder_, asker_;
};

TEST_F(LoanTest, ReadsAnySizeFromAnyRunsOverAnySpans) {
  own_.RegisterAt(*asker_);
  std::vector<size_t> sizes = {1, 2, kExtent - 1, kExtent, kExtent + 1, 8 << 20};
  for (int i = 0; i < 20; ++i) sizes.push_back(1 + random_() % (size_t{1} << (1 + random_() % 23)));
  uint64_t read = 0;
  for (const size_t size : sizes) {
    const Granted granted = Allow(size, random_() % 2 == 0);
    const std::vector<std::byte> there = Gather(granted.spans);
    std::vector<std::byte> here(size);
    const size_t longest = std::max<size_t>(size / (1 + random_() % 50), 1);
    ASSERT_TRUE(Fetch(granted.memory, granted.grant, 0, Scatter<std::byte>(here, longest, random_)).ok()) << size;
    EXPECT_TRUE(here == there) << size;
    // Into registered memory.
    const uint64_t offset = random_() % size, length = 1 + random_() % std::min(size - offset, kArea);
    const std::span<std::byte> part(own_.bytes[0].data(), length);
    ASSERT_TRUE(Fetch(granted.memory, granted.grant, offset, {part}).ok());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), there.begin() + offset)) << size << " " << offset;
    read += size + length;
    AwaitNoLoans();  // otherwise the holder would learn of its revocation before the return
    RevokeNow(*holder_, granted.grant);
  }
  const TransportStats asker = asker_->stats(), holder = holder_->stats();
  EXPECT_EQ(asker.read_bytes, read);
  EXPECT_EQ(asker.peers.at(0).path, "rma");
  EXPECT_EQ(asker.peers.at(0).bytes_received, read + 1);
  EXPECT_EQ(holder.served, 2 * sizes.size() + 1);
  EXPECT_EQ(holder.malformed + holder.refused + holder.late + asker.late, 0u);
  EXPECT_EQ(holder.loans, 0u);
}

TEST_F(LoanTest, ReadStartsAfterOwnerHasBytes) {
  const Granted granted = Allow(kArea, true, HeldBytes::How::kLater);
  std::vector<std::byte> here(kArea);
  Outcome outcome;
  asker_->Fetch(holder_->address(), granted.grant, 0, {here}, 0, outcome.done(), granted.memory);
  granted.held->WaitUntilAsked(1);
  EXPECT_EQ(holder_->stats().loans, 0u);
  Fill(granted.spans, random_);  // it is being promoted from the disk
  granted.held->Answer();
  EXPECT_TRUE(outcome.Wait().ok());
  EXPECT_TRUE(here == Gather(granted.spans));
}

TEST_F(LoanTest, ADeadlineEndsARequestAndNothingIsWrittenLater) {
  const Granted granted = Allow(kArea, true, HeldBytes::How::kLater);
  std::vector<std::byte> here(kArea);
  EXPECT_EQ(Fetch(granted.memory, granted.grant, 0, {here}, 20'000'000).code(), absl::StatusCode::kDeadlineExceeded);
  granted.held->WaitUntilAsked(1);
  granted.held->Answer();
  AwaitNoLoans();
  EXPECT_TRUE(here == std::vector<std::byte>(kArea));
  EXPECT_EQ(asker_->stats().read_bytes, 0u);
}

TEST_F(LoanTest, CancelReturnsWhenNoMoreWritesHappen) {
  const Granted granted = Allow(2 * kArea);
  int cut = 0;
  for (int i = 0; i < 10; ++i) {
    std::vector<std::byte> here(2 * kArea);
    Outcome outcome;
    const uint64_t request =
        asker_->Fetch(holder_->address(), granted.grant, 0, {here}, 0, outcome.done(), granted.memory);
    std::this_thread::sleep_for(std::chrono::microseconds(i == 0 ? 0 : random_() % 4000));
    asker_->Cancel(request);
    const absl::Status status = outcome.Wait();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    cut += !status.ok();
    std::fill(here.begin(), here.end(), std::byte{0x5a});  // another owner's memory from now on
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{0x5a}), static_cast<ptrdiff_t>(here.size()));
  }
  EXPECT_GT(cut, 0);
  AwaitNoLoans();
}

// A revoked source is reused once `quiesced` has been called: no reader sees its new contents.
TEST_F(LoanTest, ARevokedSourceIsNotReusedWhileItMayBeRead) {
  for (int i = 0; i < 10; ++i) {
    const Granted granted = Allow(2 * kArea);
    for (const auto& span : granted.spans) std::fill(span.begin(), span.end(), std::byte{7});
    std::vector<std::byte> here(2 * kArea);
    Outcome outcome;
    asker_->Fetch(holder_->address(), granted.grant, 0, {here}, 0, outcome.done(), granted.memory);
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 4000));
    RevokeNow(*holder_, granted.grant);
    for (const auto& span : granted.spans) std::fill(span.begin(), span.end(), std::byte{9});
    const absl::Status status = outcome.Wait();
    EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status)) << status;
    EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{9}), 0);
    EXPECT_TRUE(absl::IsPermissionDenied(Fetch(granted.memory, granted.grant, 0, {here})));
  }
}

// It borrows, and then sends nothing: its connection is closed, and only then does the owner get the memory back.
TEST_F(LoanTest, APeerThatNeverReturnsLoansIsDisconnected) {
  Begin({.silence = kShortSilence});
  const Granted granted = Allow(1000);
  RawClient client(holder_->address(), UCP_FEATURE_AM);
  Borrow(client, granted, 10'000'000'000);
  WaitFor([&] { return client.lost() || holder_->stats().loans == 1; });
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<bool> quiesced{false};
  holder_->Revoke(granted.grant.number, [&] { quiesced = true; });
  WaitFor([&] {
    client.lost();
    return quiesced.load();
  });
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::nanoseconds(kShortSilence));
  WaitFor([&] { return client.lost(); });
  EXPECT_EQ(holder_->stats().loans, 0u);
}

TEST_F(LoanTest, ALoanEndsAtItsDeadline) {
  Begin({.silence = kShortSilence});
  const Granted granted = Allow(1000);
  RawClient client(holder_->address(), UCP_FEATURE_AM);
  Borrow(client, granted, 50'000'000);
  WaitFor([&] { return client.lost(); });
  AwaitNoLoans();
  RevokeNow(*holder_, granted.grant);
}

TEST_F(LoanTest, AnInvalidKeyEndsOnlyItsRequest) {
  const Granted granted = Allow(1000);
  std::vector<std::byte> here(1000);
  for (const size_t size : {size_t{1}, size_t{9}, size_t{300}, size_t{20'000}}) {
    RemoteMemory wrong = *granted.memory;
    wrong.arenas[0].key.assign(size, '\xff');
    EXPECT_FALSE(Fetch(std::make_shared<const RemoteMemory>(wrong), granted.grant, 0, {here}).ok());
    AwaitNoLoans();
  }
  EXPECT_TRUE(Fetch(granted.memory, granted.grant, 0, {here}).ok());
  EXPECT_TRUE(here == Gather(granted.spans));
}

TEST_F(LoanTest, LoansNeedAGrant) {
  const Granted granted = Allow(1000);
  std::vector<std::byte> here(1000);
  Grant wrong = granted.grant;
  wrong.secret[15] ^= 1;
  EXPECT_EQ(Fetch(granted.memory, wrong, 0, {here}), absl::PermissionDeniedError("grant: unknown"));
  EXPECT_EQ(granted.held->asked(), 0u);
  EXPECT_EQ(asker_->stats().read_bytes, 0u);
}

TEST_F(LoanTest, DescribesOnlyRegisteredMemory) {
  std::byte* const begin = areas_.bytes[0].data();
  const RemoteMemory memory = holder_->Describe(
      {{begin, kExtent}, {begin + kExtent, 10}, {begin + 3 * kExtent, 5}, {areas_.bytes[1].data(), 1}});
  ASSERT_EQ(memory.arenas.size(), 2u);
  ASSERT_EQ(memory.runs.size(), 3u);
  EXPECT_EQ(memory.arenas[0].base, reinterpret_cast<uintptr_t>(begin));
  EXPECT_EQ(memory.arenas[0].bytes, kArea);
  EXPECT_EQ(memory.runs[0].bytes, kExtent + 10);
  EXPECT_EQ(memory.runs[1].offset, 3 * kExtent);
  EXPECT_EQ(memory.runs[2].arena, 1u);
  std::byte elsewhere{};
  EXPECT_TRUE(holder_->Describe({{begin, 1}, {&elsewhere, 1}}).arenas.empty());
  EXPECT_TRUE(holder_->Describe({{begin + kArea - 1, 2}}).arenas.empty());
  Spans many;
  for (size_t i = 0; i <= Transport::kMostRuns; ++i) many.push_back({begin + 2 * i, 1});
  EXPECT_TRUE(holder_->Describe(many).arenas.empty());
}

// Without RDMA there are no keys and no reads, and no feature with which UCX's software would serve any.
TEST(LoanlessTest, ATransportOverTcpGivesNoKeysAndReadsNothing) {
  for (const bool expect_rdma : {false, true}) {
    std::vector<std::byte> there(kArea, std::byte{1});
    auto started = Transport::Start({.expect_rdma = expect_rdma});
    ASSERT_TRUE(started.ok()) << started.status();
    Transport& holder = **started;
    if (holder.reads()) GTEST_SKIP() << "this machine has RDMA";
    holder.Register(there.data(), there.size(), MemoryType::kHost);
    EXPECT_EQ(holder.stats().registered_bytes, 0u);
    EXPECT_TRUE(holder.Describe({there}).arenas.empty());
    for (const UcxSetting& each : holder.settings()) {
      if (each.name == "UCX_TLS") {
        EXPECT_EQ(each.value, "tcp,self");
      }
    }
    // A client with the feature can read and write nothing (RawClientTest.OnlyGrantedAccessIsPossible covers the other
    // case).
    if (expect_rdma) {
      RawClient client(holder.address(), UCP_FEATURE_RMA);
      std::vector<std::byte> mine(1000, std::byte{9});
      client.Memory(std::span(there).first(1000), mine, true);
      client.Memory(std::span(there).first(1000), mine, false);
      EXPECT_TRUE(mine == std::vector<std::byte>(1000, std::byte{9}));
      EXPECT_TRUE(there == std::vector<std::byte>(kArea, std::byte{1}));
    }
    // A loan is refused.
    const Grant grant = holder.Allow(kArea, std::make_shared<HeldBytes>(Spans{there}));
    RawClient client(holder.address(), UCP_FEATURE_AM);
    client.Message(
        EncodeMessage(
            {.kind = MessageKind::kBorrow, .to = grant, .from = {77, {1}}, .length = 1000, .patience = 1'000'000'000}),
        {});
    WaitFor([&] { return client.lost() || holder.stats().refused == 1; });
    EXPECT_EQ(holder.stats().loans, 0u);
  }
}

// The reason why contexts with TCP lack the feature, and why a fabric must exclude unknown hosts.
TEST(LoanlessTest, UcxsSoftwareEmulationNeedsNoKey) {
  std::vector<std::byte> there(1000, std::byte{1}), mine(1000, std::byte{9});
  const auto holder = StartReading();
  RawClient client(holder->address(), UCP_FEATURE_RMA);
  for (int i = 0; i < 100 && mine != there; ++i) client.Memory(there, mine, false);
  EXPECT_TRUE(mine == there);
}

TEST(LoanlessTest, GpuMemoryThatUcxCannotReachIsLeftOut) {
  std::string logged;
  const auto transport = StartReading({.log = [&](const std::string& event, const std::string&,
                                                  const std::string& detail) { logged = event + ": " + detail; }});
  if (transport->Reaches(MemoryType::kCuda)) GTEST_SKIP() << "this UCX reaches a GPU's memory";
  std::vector<std::byte> memory(kArea);
  transport->Register(memory.data(), memory.size(), MemoryType::kCuda);
  EXPECT_EQ(transport->stats().registered_bytes, 0u);
  EXPECT_EQ(logged, "transport memory: not registered for RDMA: UCX cannot access this type of memory");
}

}  // namespace
}  // namespace ashlar::daemon
