// SPDX-License-Identifier: Apache-2.0
// Hosted memory: how long it is charged, and when it is emptied.
#include "daemon/session/hosted_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/testing/node.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kBytes = 8 << 20, kBudget = 12 << 20;  // one region fits, two do not
constexpr std::byte kOwn{0xa5};

uint64_t BytesHeldBy(const UniqueFd& memfd) {
  struct stat file {};
  EXPECT_EQ(fstat(memfd.get(), &file), 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

std::span<std::byte> Map(const UniqueFd& memfd) {
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  EXPECT_NE(mapped, MAP_FAILED);
  return {static_cast<std::byte*>(mapped), kBytes};
}

bool Holds(std::span<const std::byte> memory, std::byte value) {
  return std::all_of(memory.begin(), memory.end(), [&](std::byte byte) { return byte == value; });
}

v1::SessionRequest HostRequest() {
  v1::SessionRequest request;
  request.mutable_host_region()->set_bytes(kBytes);
  return request;
}

class HostedMemoryTest : public ::testing::Test {
 protected:
  RawSession Greeted() {
    RawSession session(node_);
    EXPECT_TRUE(StatusOf(session.Hello()).ok());
    return session;
  }
  // The region's handle; 0 if there is no space.
  static uint64_t Host(RawSession& session, UniqueFd* memfd = nullptr) {
    const auto reply = session.Ask(HostRequest(), {}, memfd);
    return StatusOf(reply).ok() ? reply->region().region() : 0;
  }
  static uint64_t Register(RawSession& session, const UniqueFd& memfd) {
    v1::SessionRequest request;
    request.mutable_register_region()->set_bytes(kBytes);
    const auto reply = session.Ask(request, std::vector<int>{memfd.get()});
    return StatusOf(reply).ok() ? reply->region().region() : 0;
  }
  static bool Drop(RawSession& session, uint64_t region) {
    v1::SessionRequest request;
    request.mutable_drop_region()->set_region(region);
    return StatusOf(session.Ask(request)).ok();
  }
  bool NoSpaceForAWhile(RawSession& session) {
    std::this_thread::sleep_for(std::chrono::milliseconds(600));  // more than two sweeps
    return Host(session) == 0;
  }

  TestNode node_{
      absl::StrCat("tenants: [{name: a, uids: [", geteuid(), "], dram_bytes: 4MiB, region_bytes: ", kBudget, "}]")};
};

TEST_F(HostedMemoryTest, ADroppedRegionIsEmptiedEvenIfItsDescriptorIsKept) {
  RawSession session = Greeted();
  std::vector<UniqueFd> kept(20);
  uint64_t held = 0;
  for (UniqueFd& memfd : kept) {
    const uint64_t region = Host(session, &memfd);
    ASSERT_NE(region, 0u);
    EXPECT_EQ(BytesHeldBy(memfd), kBytes);
    ASSERT_TRUE(Drop(session, region));
    held += BytesHeldBy(memfd);
  }
  EXPECT_EQ(held, 0u);
}

// However the session ended: by a hang-up or by a protocol error. The engine lives on and works in its memory.
TEST_F(HostedMemoryTest, EndedSessionStaysChargedWhileHeld) {
  RawSession other = Greeted();
  for (const bool hang_up : {true, false}) {
    UniqueFd memfd;
    {
      RawSession session = Greeted();
      ASSERT_TRUE(Eventually([&] { return Host(session, &memfd) != 0; }));
      if (!hang_up) {
        ASSERT_TRUE(session.Send("no request at all"));
        EXPECT_TRUE(session.Receive().ok());
        EXPECT_TRUE(session.Closed());
      }
    }
    const std::span<std::byte> memory = Map(memfd);
    std::fill(memory.begin(), memory.end(), kOwn);
    EXPECT_TRUE(NoSpaceForAWhile(other));
    memfd.Reset();
    EXPECT_TRUE(NoSpaceForAWhile(other)) << "it is mapped still";
    EXPECT_TRUE(Holds(memory, kOwn));
    munmap(memory.data(), memory.size());
    uint64_t region = 0;
    EXPECT_TRUE(Eventually([&] { return (region = Host(other)) != 0; })) << "the engine no longer holds the memory";
    EXPECT_TRUE(Drop(other, region));
  }
}

TEST_F(HostedMemoryTest, ReregistersWithNextSessionWithoutExtraBudget) {
  UniqueFd memfd;
  RawSession first = Greeted();
  ASSERT_NE(Host(first, &memfd), 0u);
  const std::span<std::byte> memory = Map(memfd);
  std::fill(memory.begin(), memory.end(), kOwn);
  RawSession second = Greeted();
  uint64_t region = Register(second, memfd);
  EXPECT_NE(region, 0u) << "before the end of the first is noticed";
  first.Close();
  ASSERT_TRUE(NoSpaceForAWhile(second));
  EXPECT_TRUE(Holds(memory, kOwn));
  second.Close();
  RawSession third = Greeted();
  ASSERT_TRUE(NoSpaceForAWhile(third));
  region = Register(third, memfd);
  ASSERT_NE(region, 0u) << "after the end of all others";
  EXPECT_TRUE(Holds(memory, kOwn));
  EXPECT_TRUE(Drop(third, region));
  EXPECT_EQ(BytesHeldBy(memfd), 0u);
  EXPECT_NE(Host(third), 0u);
  munmap(memory.data(), memory.size());
}

TEST_F(HostedMemoryTest, DroppingInOneSessionKeepsItForAnother) {
  UniqueFd memfd;
  RawSession first = Greeted(), second = Greeted();
  const uint64_t hosted = Host(first, &memfd), registered = Register(second, memfd);
  ASSERT_TRUE(hosted != 0 && registered != 0);
  EXPECT_TRUE(Drop(first, hosted));
  EXPECT_EQ(BytesHeldBy(memfd), kBytes);
  EXPECT_TRUE(Drop(second, registered));
  EXPECT_EQ(BytesHeldBy(memfd), 0u);
}

// A read-only descriptor that the engine has opened itself: whether or not the kernel counts it, memory that is no
// longer charged is empty.
TEST_F(HostedMemoryTest, IsAlwaysCharged) {
  RawSession other = Greeted();
  UniqueFd memfd;
  {
    RawSession session = Greeted();
    ASSERT_NE(Host(session, &memfd), 0u);
  }
  UniqueFd reading(open(absl::StrCat("/proc/self/fd/", memfd.get()).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(reading.valid());
  memfd.Reset();
  const bool charged = NoSpaceForAWhile(other);
  EXPECT_EQ(BytesHeldBy(reading), charged ? kBytes : 0);
}

TEST_F(HostedMemoryTest, KilledEngineFreesMemory) {
  UniqueFd memfd;
  RawSession session = Greeted();
  ASSERT_NE(Host(session, &memfd), 0u);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t engine = fork();  // holds the memory, like an engine of several processes
  if (engine == 0) {
    close(session.fd());
    if (write(ready[1], "r", 1) == 1) pause();
    _exit(1);
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  memfd.Reset();
  session.Close();
  RawSession other = Greeted();
  EXPECT_TRUE(NoSpaceForAWhile(other)) << "the engine's other process lives";
  kill(engine, SIGKILL);
  waitpid(engine, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return Host(other) != 0; }));
  close(ready[0]);
  close(ready[1]);
}

// An engine's own memfd without pages: the daemon allocates them at its charge.
TEST_F(HostedMemoryTest, AdoptedMemoryIsChargedWhileHeld) {
  RawSession session = Greeted();
  UniqueFd memfd = MakeMemfd(kBytes, F_SEAL_SHRINK);
  uint64_t region = Register(session, memfd);
  ASSERT_NE(region, 0u);
  EXPECT_EQ(BytesHeldBy(memfd), kBytes);
  EXPECT_EQ(Host(session), 0u) << "it is charged";
  const std::span<std::byte> memory = Map(memfd);
  std::fill(memory.begin(), memory.end(), kOwn);
  ASSERT_TRUE(Drop(session, region));
  EXPECT_TRUE(NoSpaceForAWhile(session)) << "the engine keeps its descriptor";
  EXPECT_TRUE(Holds(memory, kOwn)) << "and works in its memory";
  region = Register(session, memfd);
  EXPECT_NE(region, 0u) << "again, without more space";
  EXPECT_TRUE(Drop(session, region));
  memfd.Reset();
  EXPECT_TRUE(NoSpaceForAWhile(session)) << "it is mapped still";
  EXPECT_TRUE(Holds(memory, kOwn));
  munmap(memory.data(), memory.size());
  EXPECT_TRUE(Eventually([&] { return Host(session) != 0; })) << "the engine no longer holds the memory";
}

TEST_F(HostedMemoryTest, AdoptedMemoryIsAlwaysCharged) {
  RawSession session = Greeted();
  UniqueFd memfd = MakeMemfd(kBytes, F_SEAL_SHRINK);
  const uint64_t region = Register(session, memfd);
  ASSERT_NE(region, 0u);
  const UniqueFd reading(open(absl::StrCat("/proc/self/fd/", memfd.get()).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(reading.valid() && Drop(session, region));
  memfd.Reset();
  const bool charged = NoSpaceForAWhile(session);
  EXPECT_EQ(BytesHeldBy(reading), charged ? kBytes : 0);
}

TEST_F(HostedMemoryTest, PagesAllocatedByTheEngineAreNotCharged) {
  RawSession session = Greeted();
  const UniqueFd memfd = MakeMemfd(kBytes, F_SEAL_SHRINK);
  ASSERT_EQ(fallocate(memfd.get(), 0, 0, kBytes), 0);
  const uint64_t region = Register(session, memfd);
  ASSERT_TRUE(region != 0 && Drop(session, region));
  EXPECT_NE(Host(session), 0u);
  EXPECT_EQ(BytesHeldBy(memfd), kBytes);
}

// Each keeps a descriptor of the daemon, like a region.
TEST(HostedBlocks, DroppedButHeldBlocksCountAsRegions) {
  const TestNode node(absl::StrCat("tenants: [{name: a, uids: [", geteuid(), "], dram_bytes: 4MiB, max_regions: 2}]"));
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const auto register_one = [&](const UniqueFd& memfd) {
    v1::SessionRequest request;
    request.mutable_register_region()->set_bytes(4096);
    return session.Ask(request, std::vector<int>{memfd.get()});
  };
  std::vector<UniqueFd> kept;
  for (int i = 0; i < 2; ++i) {
    kept.push_back(MakeMemfd(4096, F_SEAL_SHRINK));
    const auto reply = register_one(kept.back());
    ASSERT_TRUE(StatusOf(reply).ok());
    v1::SessionRequest drop;
    drop.mutable_drop_region()->set_region(reply->region().region());
    ASSERT_TRUE(StatusOf(session.Ask(drop)).ok());
  }
  const UniqueFd next = MakeMemfd(4096, F_SEAL_SHRINK);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // more than two sweeps
  const absl::Status refused = StatusOf(register_one(next));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            "register_region.descriptor: the tenant may have at most 2 regions, including dropped ones that are still "
            "in use");
  kept.clear();
  EXPECT_TRUE(Eventually([&] { return StatusOf(register_one(next)).ok(); }));
}

// Small ones also count: each keeps a descriptor of the daemon.
TEST(HostedBlocks, NumberIsBounded) {
  const TestNode node("sessions: {max_sessions: 2}");
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  v1::SessionRequest request;
  request.mutable_host_region()->set_bytes(4096);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(StatusOf(session.Ask(request)).ok()) << i;
  const absl::Status status = StatusOf(session.Ask(request));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "host_region.bytes: a tenant has at most 8 hosted regions");
}

TEST_F(HostedMemoryTest, OutlivesTheDaemon) {
  UniqueFd memfd;
  RawSession session = Greeted();
  ASSERT_NE(Host(session, &memfd), 0u);
  const std::span<std::byte> memory = Map(memfd);
  std::fill(memory.begin(), memory.end(), kOwn);
  node_.Stop();
  EXPECT_TRUE(Holds(memory, kOwn));
  munmap(memory.data(), memory.size());
}

}  // namespace
}  // namespace ashlar::daemon
