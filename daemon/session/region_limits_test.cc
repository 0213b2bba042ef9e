// SPDX-License-Identifier: Apache-2.0
// Limits on the mappings, descriptors and memory of the daemon that engines use by their regions.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/falloc.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/session/region.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kPage = 4096;

absl::StatusOr<v1::SessionReply> Register(RawSession& session, const UniqueFd& memfd, uint64_t bytes) {
  v1::SessionRequest request;
  request.mutable_register_region()->set_bytes(bytes);
  return session.Ask(request, std::vector<int>{memfd.get()});
}

absl::Status Drop(RawSession& session, uint64_t region) {
  v1::SessionRequest request;
  request.mutable_drop_region()->set_region(region);
  return StatusOf(session.Ask(request));
}

v1::SessionRequest RegionRequest(uint64_t bytes) {
  v1::SessionRequest request;
  request.mutable_host_region()->set_bytes(bytes);
  return request;
}

uint64_t BytesThere(const UniqueFd& memfd) {
  struct stat file {};
  EXPECT_EQ(fstat(memfd.get(), &file), 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

// Mappings of this process of the memfds that MakeMemfd makes.
size_t MappingsOfMemfds() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:ashlar-test") != std::string::npos ? 1 : 0;
  return count;
}

TEST(RegionLimits, AreCountedAsMappingsBySessionAndTenant) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  const TestNode node(
      "sessions: {max_regions: 3}\n"
      "tenants: [{name: a, uids: [0], dram_bytes: 4MiB, max_regions: 5}, {name: b, uids: [65531], dram_bytes: 4MiB}]");
  const UniqueFd memfd = MakeMemfd(kPage, F_SEAL_SHRINK);
  RawSession first(node), second(node);
  ASSERT_TRUE(StatusOf(first.Hello()).ok());
  ASSERT_TRUE(StatusOf(second.Hello()).ok());
  std::vector<uint64_t> regions;
  for (int i = 0; i < 3; ++i) {
    const auto reply = Register(first, memfd, kPage);
    ASSERT_TRUE(StatusOf(reply).ok());
    regions.push_back(reply->region().region());
  }
  EXPECT_EQ(MappingsOfMemfds(), 3u) << "mappings of one file from its start are not merged";
  const absl::Status of_session = StatusOf(Register(first, memfd, kPage));
  EXPECT_EQ(of_session.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(of_session.message(), "register_region.descriptor: a session has at most 3 regions");
  EXPECT_EQ(StatusOf(first.Ask(RegionRequest(kPage))).message(), "host_region: a session has at most 3 regions");
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(StatusOf(second.Ask(RegionRequest(kPage))).ok());
  EXPECT_EQ(StatusOf(Register(second, memfd, kPage)).message(),
            "register_region.descriptor: a tenant has at most 5 regions");
  AsUser(65531, [&] {
    RawSession other(node);
    EXPECT_TRUE(StatusOf(other.Hello()).ok());
    EXPECT_TRUE(StatusOf(other.Ask(RegionRequest(kPage))).ok());
  });
  ASSERT_TRUE(Drop(first, regions[0]).ok());
  EXPECT_TRUE(StatusOf(Register(second, memfd, kPage)).ok()) << "what is unmapped counts no more";
  first.Close();
  EXPECT_TRUE(Eventually([] { return MappingsOfMemfds() == 1; }));
}

TEST(RegionLimits, SmallRegionsAreChargedAMinimum) {
  const TestNode node(absl::StrCat("sessions: {region_bytes: ", 2 * kLeastRegionBytes, "}"));
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const UniqueFd memfd = MakeMemfd(kPage, F_SEAL_SHRINK);
  ASSERT_TRUE(StatusOf(Register(session, memfd, kPage)).ok());
  ASSERT_TRUE(StatusOf(session.Ask(RegionRequest(kPage))).ok());
  EXPECT_THAT(std::string(StatusOf(Register(session, memfd, kPage)).message()),
              StartsWith("register_region.bytes: a session has at most"));
}

TEST(RegionLimits, UntouchedMemoryIsAllocatedBeforeTheReply) {
  constexpr uint64_t kFileBytes = 8 << 20;
  const TestNode node;
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const UniqueFd sparse = MakeMemfd(kFileBytes, F_SEAL_SHRINK);
  ASSERT_EQ(fallocate(sparse.get(), 0, kPage, kPage), 0);
  ASSERT_TRUE(StatusOf(Register(session, sparse, kFileBytes / 2)).ok());
  EXPECT_EQ(BytesThere(sparse), kFileBytes) << "all of the file: its holes are counted, not found";
  const TestNode small(absl::StrCat("sessions: {region_bytes: ", kFileBytes - 1, "}"));
  RawSession other(small);
  ASSERT_TRUE(StatusOf(other.Hello()).ok());
  const UniqueFd more = MakeMemfd(kFileBytes, F_SEAL_SHRINK);
  EXPECT_THAT(std::string(StatusOf(Register(other, more, kPage)).message()),
              StartsWith("register_region.bytes: a session has at most"))
      << "and all of it is charged";
  EXPECT_EQ(BytesThere(more), 0u);
  EXPECT_TRUE(StatusOf(Register(other, sparse, kPage)).ok()) << "what is there already is not";
}

TEST(RegionLimits, MemoryBeyondTheMachinesIsNotRegistered) {
  constexpr uint64_t kFileBytes = uint64_t{1} << 45;
  const TestNode node("sessions: {region_bytes: 1024TiB}");
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const UniqueFd sparse = MakeMemfd(kFileBytes, F_SEAL_SHRINK);
  const absl::Status refused = StatusOf(Register(session, sparse, kFileBytes));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), StartsWith("register_region.bytes: "));
  EXPECT_EQ(BytesThere(sparse), 0u);
  EXPECT_TRUE(StatusOf(session.Ask(RegionRequest(kPage))).ok()) << "the session goes on";
}

// Arenas are created on demand: the memory that they may take is not given to engines' untouched memory.
TEST(RegionLimits, MemoryReservedForArenasIsNotGivenToEngines) {
  constexpr uint64_t kFileBytes = 16 << 20;
  const uint64_t too_much = uint64_t{1} << 45;
  const UniqueFd sparse = MakeMemfd(kFileBytes, F_SEAL_SHRINK);
  auto region = Region::Register(sparse, kFileBytes);
  ASSERT_TRUE(region.ok());
  EXPECT_EQ((*region)->TakePages(too_much).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(BytesThere(sparse), 0u);
  EXPECT_TRUE((*region)->TakePages(0).ok());
  EXPECT_EQ(BytesThere(sparse), kFileBytes);
}

// Pages that an engine frees in its region would be allocated again by the daemon, at the daemon's charge.
TEST(RegionLimits, MissingPagesAreNotAccessed) {
  const TestNode node;
  TestEngine engine(node);
  const std::vector<int32_t> tokens = Ascending(20, 1);
  ASSERT_EQ(engine.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const auto match = engine.Match(tokens, {20});
  ASSERT_TRUE(match.ok());
  ASSERT_EQ(madvise(engine.memory(), kPage, MADV_REMOVE), 0);

  const auto landed = engine.Land(engine.LandRequest(match->lease(), {At(0, 0)}));
  EXPECT_EQ(landed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(landed.status().message()), HasSubstr("pages_id: 4096 bytes of the region were freed"));
  const v1::ReserveResult reserved = engine.Reserve(ObjectKind::kCheckpoint, Ascending(20, 50));
  v1::PublishRequest publish = engine.Make<v1::PublishRequest>();
  *publish.add_objects() = engine.Sources(ObjectKind::kCheckpoint, reserved.reservation(), 20);
  v1::PublishReply published;
  const absl::Status refused = engine.Call(publish, &published);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("were freed"));

  engine.memory()[0] = std::byte{1};  // allocates the page again
  EXPECT_THAT(*engine.Land(engine.LandRequest(match->lease(), {At(0, 0)})), Each(MissReason::kNone));
}

// An engine that sends requests but does not read has one descriptor in flight; later replies arrive when it reads.
TEST(UnreadReplies, CarryOneDescriptorPerSession) {
  constexpr int kAsked = 40;
  const TestNode node;
  RawSession session(node);
  UniqueFd process;
  ASSERT_TRUE(StatusOf(session.Hello(&process)).ok());
  for (int i = 0; i < kAsked; ++i) ASSERT_TRUE(session.Send(RegionRequest(kPage).SerializeAsString()));
  const auto unread = [&] {
    int bytes = 0;
    EXPECT_EQ(ioctl(session.fd(), SIOCINQ, &bytes), 0);
    return bytes;
  };
  ASSERT_TRUE(Eventually([&] { return unread() > 0; }));
  const int one = unread();
  RawSession other(node);
  ASSERT_TRUE(StatusOf(other.Hello()).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(StatusOf(other.Ask(RegionRequest(kPage))).ok());
  EXPECT_EQ(unread(), one);
  for (int i = 0; i < kAsked; ++i) {
    UniqueFd descriptor;
    ASSERT_TRUE(StatusOf(session.Receive(&descriptor)).ok()) << i;
    EXPECT_TRUE(descriptor.valid());
  }
}

// Replies without a descriptor do not wait: an engine may drop regions and read the replies later.
TEST(UnreadReplies, RepliesWithoutDescriptorsBlockNothing) {
  const TestNode node;
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  std::vector<uint64_t> regions;
  for (int i = 0; i < 10; ++i) regions.push_back(session.Ask(RegionRequest(kPage))->region().region());
  const size_t before = OpenDescriptors();
  for (const uint64_t region : regions) {
    v1::SessionRequest drop;
    drop.mutable_drop_region()->set_region(region);
    ASSERT_TRUE(session.Send(drop.SerializeAsString()));
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before - 2 * regions.size(); })) << "dropped, unread";
}

// A tenant whose ended sessions hold its share is told to retry; a reply that it never gets leaks nothing.
TEST(UnreadReplies, EndedSessionsUseOnlyTheirTenantsShare) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  const TestNode node(
      "sessions: {max_sessions: 4}\n"
      "tenants: [{name: a, uids: [0], dram_bytes: 4MiB, max_sessions: 1}, {name: b, uids: [65531], dram_bytes: 4MiB}]");
  std::vector<UniqueFd> kept;  // another process could keep them
  for (int i = 0; i < 2; ++i) {
    RawSession session(node);
    v1::SessionRequest hello;
    hello.mutable_hello()->set_protocol_max(limits::kProtocolMax);
    ASSERT_TRUE(session.Send(hello.SerializeAsString()));
    kept.emplace_back(fcntl(session.fd(), F_DUPFD_CLOEXEC, 0));
    int bytes = 0;
    ASSERT_TRUE(Eventually([&] { return ioctl(session.fd(), SIOCINQ, &bytes) == 0 && bytes > 0; }));
    ASSERT_TRUE(session.Send("no request at all"));  // ends the session, not the socket
    ASSERT_TRUE(Eventually([&] {
      pollfd end{kept.back().get(), POLLRDHUP, 0};
      return poll(&end, 1, 0) == 1 && (end.revents & POLLRDHUP) != 0;
    }));
  }
  RawSession third(node);
  const absl::Status refused = StatusOf(third.Hello());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("try again"));
  EXPECT_TRUE(third.Closed());
  AsUser(65531, [&] {
    RawSession other(node);
    EXPECT_TRUE(StatusOf(other.Hello()).ok());
  });
  kept.clear();
  EXPECT_TRUE(Eventually([&] { return StatusOf(RawSession(node).Hello()).ok(); }));
}

}  // namespace
}  // namespace ashlar::daemon
