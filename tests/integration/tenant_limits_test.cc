// SPDX-License-Identifier: Apache-2.0
// One tenant's use of the daemon's mappings, descriptors and memory does not affect other tenants.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ashlar/v1/session.pb.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/memory_group.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint32_t kVictim = 65531, kDaemon = 65532;
constexpr auto kExhausted = static_cast<uint32_t>(absl::StatusCode::kResourceExhausted);

int MakeMemfd(uint64_t bytes) {
  const int fd = ::memfd_create("tenant-limits", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  return fd;
}

uint64_t ResidentBytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;
  }
  ADD_FAILURE() << "no RssAnon";
  return 0;
}

size_t Mappings(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

// Tenant "attacker" is this process; tenant "victim" has engines in separate processes.
class TenantLimits : public testing::Test {
 protected:
  void Start(DaemonOptions options, uint32_t attackers) {
    options.dram = "64MiB";
    options.arena = "4MiB";
    options.sessions = "sessions: {max_sessions: " + std::to_string(attackers + 8) + "}\n";
    options.tenants =
        "tenants:\n  - {name: attacker, uids: [0], dram_bytes: 16MiB, max_sessions: " + std::to_string(attackers) +
        "}\n  - {name: victim, uids: [65531], dram_bytes: 48MiB, max_sessions: 8, max_regions: 64}\n";
    daemon_ = std::make_unique<DaemonProcess>(options);
  }
  // A session from its hello, another 4 MiB arena, and its mapping.
  void ExpectVictimServed(int round) {
    EngineProcess engine(daemon_->client_options(), {"publish", std::to_string(100 + round), "3", "700"},
                         {.uid = kVictim});
    ASSERT_EQ(engine.ReadLine(), "published") << round;
    EngineProcess arenas(daemon_->client_options(), {"arenas", "0", "0", "0"}, {.uid = kVictim});
    const std::string line = arenas.ReadLine();
    ASSERT_THAT(line, StartsWith("arenas "));
    const size_t now = std::stoul(line.substr(7));
    ASSERT_GE(now, arenas_) << round;
    arenas_ = now;
  }

  // A request of the attacker for an arena.
  v1::SessionRequest OwnArena() {
    v1::SessionRequest request;
    EXPECT_TRUE(Eventually([&] {
      RawSession session(daemon_->client_options());
      if (session.Greet() == "") return false;
      for (uint32_t arena = 0; arena < 64; ++arena) {
        request.mutable_get_arena()->set_arena(arena);
        if (session.Ask(request).has_arena()) return true;
      }
      return false;
    }));
    return request;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  size_t arenas_ = 1;
};

// 64 sessions × 1,024 regions would use all mappings of a process.
TEST_F(TenantLimits, ATenantsRegionsLeaveMappingsToOthers) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
  constexpr int kSessions = 64, kRegions = 1024;
  Start({}, kSessions);
  ExpectVictimServed(0);
  const size_t before = Mappings(daemon_->pid());
  const int memfd = MakeMemfd(4096);
  v1::SessionRequest request;
  request.mutable_register_region()->set_bytes(4096);
  std::vector<std::unique_ptr<RawSession>> sessions;
  size_t registered = 0;
  for (int i = 0; i < kSessions; ++i) {
    sessions.push_back(std::make_unique<RawSession>(daemon_->client_options()));
    ASSERT_NE(sessions.back()->Greet(), "");
    v1::SessionReply reply;
    int regions = 0;
    while (regions < kRegions && (reply = sessions.back()->Ask(request, {memfd})).code() == 0) ++regions;
    registered += regions;
    ASSERT_EQ(reply.code(), kExhausted) << registered;
    ASSERT_THAT(reply.message(), HasSubstr("regions"));
    if (i % 16 == 0) ExpectVictimServed(1 + i / 16);
  }
  ::close(memfd);
  EXPECT_EQ(registered, kSessions * 16);
  EXPECT_EQ(daemon_->Metric("ashlar_regions_limit{tenant=\"attacker\"}"), kSessions * 16);
  EXPECT_TRUE(Eventually([&] { return daemon_->Metric("ashlar_regions{tenant=\"attacker\"}") == kSessions * 16; }));
  EXPECT_LT(Mappings(daemon_->pid()), before + registered + 512);
  ExpectVictimServed(9);
}

// Each unread descriptor counts against the daemon's user. The kernel does not apply that limit to root.
TEST_F(TenantLimits, ATenantsUnreadRepliesLeaveDescriptorsToOthers) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
  constexpr int kSessions = 130, kAsked = 120;
  constexpr uint64_t kFiles = 8000;
  Start({.uid = kDaemon, .max_files = kFiles}, kSessions);
  ExpectVictimServed(0);
  std::optional<TestEngine> publisher(daemon_->client_options());
  publisher->PublishPrompt(MakePrompt(1, 2, 60));  // so that there is an arena to request
  publisher.reset();
  v1::SessionRequest request = OwnArena();
  std::vector<std::unique_ptr<RawSession>> sessions;
  for (int i = 0; i < kSessions; ++i) {
    sessions.push_back(std::make_unique<RawSession>(daemon_->client_options()));
    ASSERT_TRUE(Eventually([&] {  // the publisher's slot may not be free yet
      if (sessions.back()->Greet() != "") return true;
      sessions.back() = std::make_unique<RawSession>(daemon_->client_options());
      return false;
    }));
    for (int asked = 0; asked < kAsked; ++asked) ASSERT_TRUE(sessions.back()->Send(request)) << i;
    if (i % 32 == 0) ExpectVictimServed(1 + i / 32);
  }
  ExpectVictimServed(9);
  EXPECT_EQ(daemon_->Metric("ashlar_descriptor_send_failures_total{tenant=\"victim\"}"), 0);
  int answered = 0;
  for (int asked = 0; asked < kAsked; ++asked) answered += sessions[0]->Receive().has_arena() ? 1 : 0;
  EXPECT_EQ(answered, kAsked) << "a client that reads late gets its answers";
  EXPECT_TRUE(Eventually([&] { return daemon_->Metric("ashlar_sessions") == kSessions; })) << "no session has ended";
}

// Pages are charged to the daemon's own cgroup if the daemon touches them first.
TEST(EngineMemory, UntouchedMemoryDoesNotKillDaemon) {
  constexpr uint64_t kBytes = 512 * kMiB, kLimit = 400 * kMiB;
  DaemonProcess daemon;
  const auto group = MemoryGroup::Make(kLimit);
  if (group == nullptr) GTEST_SKIP() << "no group of processes can be made here whose memory is limited";
  ASSERT_TRUE(group->Add(daemon.pid()));
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(8, 2, 40);
  engine.PublishPrompt(prompt);

  const int memfd = MakeMemfd(kBytes);
  const absl::Status refused = engine.client().RegisterRegion(memfd, kBytes).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("register_region.bytes: "));
  // As many pages are allocated past the end as are missing inside, but they do not replace those.
  const int full_behind = MakeMemfd(kBytes);
  EXPECT_EQ(::fallocate(full_behind, FALLOC_FL_KEEP_SIZE, kBytes, kBytes), 0);
  const absl::Status hidden = engine.client().RegisterRegion(full_behind, kBytes).status();
  EXPECT_EQ(hidden.code(), absl::StatusCode::kResourceExhausted) << hidden;
  ::close(full_behind);
  EXPECT_EQ(::fallocate(memfd, 0, 0, kBytes), 0);  // at this process's charge
  EXPECT_TRUE(engine.client().RegisterRegion(memfd, kBytes).ok());
  ::close(memfd);
  EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
  EXPECT_LT(group->Used(), 256 * kMiB);
}

// The daemon also does not pay for pages that an engine repeatedly frees between the daemon's check and its writes.
TEST(EngineMemory, FreedDuringWriteIsNotCharged) {
  constexpr auto kTouched = TestEngine::Memory::kTouched;
  constexpr int kRounds = 16;
  constexpr uint64_t kLanded = 8000 * 2 * 2 * 56 * sizeof(float);
  DaemonProcess daemon({.dram = "64MiB"});
#if defined(__SANITIZE_THREAD__)
  constexpr uint64_t kLimit = 4096 * kMiB;  // the sanitizer's shadow memory counts as the daemon's
#else
  constexpr uint64_t kLimit = 400 * kMiB;
#endif
  const auto group = MemoryGroup::Make(kLimit);
  if (group == nullptr) GTEST_SKIP() << "no group of processes can be made here whose memory is limited";
  ASSERT_TRUE(group->Add(daemon.pid()));
  const std::vector<Tokens> prompt = MakePrompt(8, 8, 1000);
  std::vector<std::unique_ptr<TestEngine>> engines;  // kept memory stays charged to the tenant that allocated it
  uint64_t before = 0;                               // the arenas
  for (int round = 0; round < kRounds; ++round) {
    engines.push_back(std::make_unique<TestEngine>(daemon.client_options(), Shape{.tokens = 8192}, kTouched));
    TestEngine& engine = *engines.back();
    if (round == 0) {
      engine.PublishPrompt(prompt);
      EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
      before = group->Shared();
      EXPECT_GT(before, 0u);
    }
    const Match match = engine.Lookup(prompt);
    std::thread freeing([&, round] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      ::madvise(engine.region().data(), engine.region().size() / 4096 * 4096, MADV_REMOVE);
    });
    Landing landing = engine.Land(match, prompt);
    landing.Wait(kPatience);  // landed, or missed if the pages were freed before it began
    landing.WaitQuiesced(kPatience);
    freeing.join();
  }
  EXPECT_LT(group->Shared(), before + kLanded / 2) << "what the engines freed is not the daemon's";
  engines.clear();
  TestEngine engine(daemon.client_options(), Shape{.tokens = 8192}, kTouched);
  EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
}

// The same for pages that the engine has freed.
TEST(EngineMemory, FreedPagesAreMisses) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(8, 2, 40);
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  ASSERT_EQ(::madvise(engine.region().data(), engine.region().size() / 4096 * 4096, MADV_REMOVE), 0);
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kInvalidRequest));
  std::memset(engine.region().data(), 1, engine.region().size());
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kNone));
}

// Sixteen heads of 1 MiB per layer.
Layout LargeLayout(uint32_t layers) {
  Layout layout{.page_tokens = 16, .head = 16, .tail = 16, .layers = {}};
  for (uint32_t i = 0; i < layers; ++i) {
    LinearLayer layer{.family = Family::kMamba1, .key_heads = 16, .value_heads = 16, .d_k = 256, .d_v = 256};
    layer.decay_table.assign(size_t{16} * 256 * 256, -1.0F);
    layer.transition = TransitionForm::kElementwise;
    layout.layers.push_back(layer);
  }
  return layout;
}

Identity WithAdapter(int adapter) {
  Identity identity = TestEngine::identity();
  identity.lora = "adapter " + std::to_string(adapter);
  return identity;
}

TEST(ModelMemory, IsBoundedPerTenant) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options()), other(daemon.client_options());
  const auto charged = [&] { return daemon.Metric("ashlar_model_bytes{tenant=\"default\"}"); };
  const Layout layout = LargeLayout(7);
  const double tables = 7.0 * 4 * kMiB;
  [[maybe_unused]] const uint64_t before = ResidentBytes(daemon.pid());  // sanitizers keep additional memory
  std::vector<Model> open;
  absl::Status refused;
  for (int i = 0; i < 64 && refused.ok(); ++i) {
    auto model = engine.client().OpenModel(WithAdapter(i), layout, {}, {}, {.capture_tokens = 16});
    model.ok() ? open.push_back(*std::move(model)) : void(refused = model.status());
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("layout: a tenant has at most 268435456 bytes of models"));
  const double models = static_cast<double>(open.size());
  EXPECT_GE(models, 6) << "of 256 MiB, two of them for the one that is being opened";
  // The refused one is also charged for a moment.
  EXPECT_TRUE(Eventually([&] { return charged() >= models * tables && charged() < (models + 0.5) * tables; }));
  EXPECT_LE(charged(), 256.0 * kMiB);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const auto grown = static_cast<double>(ResidentBytes(daemon.pid()) - before);
  EXPECT_LE(grown, 1.1 * charged() + 48 * kMiB) << "what is charged is what it takes";
#endif
  // Opening one of these models again takes no more tables, and is not refused.
  const double all = charged();
  const auto again = other.client().OpenModel(WithAdapter(0), layout, {}, {}, {.capture_tokens = 16});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(Eventually([&] { return charged() > all; })) << all << " bytes, and now " << charged();
  EXPECT_LT(charged(), all + kMiB);
  // The remembered closed models are evicted.
  open.clear();
  EXPECT_TRUE(Eventually([&] { return charged() < 3 * tables; }));
  for (int i = 100; i < 106; ++i) {
    ASSERT_TRUE(Eventually([&] {
      auto model = engine.client().OpenModel(WithAdapter(i), layout);
      if (model.ok()) open.push_back(*std::move(model));
      return absl::IsResourceExhausted(model.status()) ? false : true;
    })) << i;
  }
}

}  // namespace
}  // namespace ashlar::integration
