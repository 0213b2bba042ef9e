// SPDX-License-Identifier: Apache-2.0
// Engines whose memory is on a GPU. Built twice: against an emulated GPU, where a CPU thread that touches GPU memory
// gets a fatal signal, and, where a CUDA compiler is found, against CUDA, which needs a GPU to run.
#include "kernels/gpu.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/session/client.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Memory = TestEngine::Memory;

constexpr std::byte kPoison{0x5a};

DaemonOptions WithGpu() {
  return {.gpu = "gpu: {device: 0}\n", .program = GPU_ASHLARD};
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = kernels::FindGpu(0, &why);
    if (gpu_ == nullptr) GTEST_SKIP() << why;
  }
  // Allocates at least `bytes` on the GPU, which last until the test ends, and registers them.
  absl::StatusOr<Region> Register(Client& client, uint64_t bytes) {
    kernels::ArenaError error;
    auto arena = gpu_->MakeArena(bytes, &error);
    if (arena == nullptr) return absl::ResourceExhaustedError(error.message);
    arenas_.push_back(std::move(arena));
    return client.RegisterGpuRegion(arenas_.back()->descriptor(), arenas_.back()->data(), arenas_.back()->bytes());
  }
  const kernels::Gpu* gpu_ = nullptr;
  std::vector<std::unique_ptr<kernels::ArenaMemory>> arenas_;
};
using GpuRegions = GpuTest;

// Lands all of it into the engine's poisoned pages, and checks every byte.
void ExpectLands(TestEngine& engine, const std::vector<Tokens>& prompt) {
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  Landing landing = engine.Land(match, prompt);
  EXPECT_THAT(landing.Wait(kPatience), Each(MissReason::kNone));
  EXPECT_TRUE(landing.quiesced());
  uint64_t position = 0;
  for (size_t i = 0; i < prompt.size(); ++i) {
    engine.ExpectTuples(match, i, prompt[i]);
    engine.ExpectLanded(KindOfSegment(i), prompt[i], position, kPoison);
    position += prompt[i].size();
  }
}

TEST_F(GpuRegions, LandWhatWasPublishedFromAnyMemory) {
  DaemonProcess daemon(WithGpu());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  TestEngine host(daemon.client_options());
  EXPECT_EQ(engine.region().memory(), kernels::MemoryKind::kDevice);
  const std::vector<Tokens> theirs = MakePrompt(1, 3, 90), ours = MakePrompt(2, 3, 110);
  host.PublishPrompt(theirs);
  engine.PublishPrompt(ours);
  for (TestEngine* reader : {&engine, &host}) {
    ExpectLands(*reader, theirs);
    ExpectLands(*reader, ours);
  }
}

TEST_F(GpuRegions, CorruptBytesAreAMissOfTheirSegment) {
  DaemonProcess daemon(WithGpu());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  const std::vector<Tokens> prompt = MakePrompt(3, 4, 60);
  engine.PublishPrompt(prompt);
  ASSERT_EQ(FlipInArenas(daemon.pid(), engine.ValueRow(ObjectKind::kSegment, prompt[1], 1, 30)), 1);
  ASSERT_EQ(FlipInArenas(daemon.pid(), engine.StateOfHead(ObjectKind::kSegment, prompt[3], 2, 0)), 1);
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), ElementsAre(MissReason::kNone, MissReason::kChecksumFailed,
                                                                      MissReason::kNone, MissReason::kChecksumFailed));
  engine.ExpectLanded(ObjectKind::kSegment, prompt[2], 120, kPoison);
}

TEST_F(GpuRegions, AreRegisteredAgainAfterDaemonRestart) {
  DaemonProcess daemon(WithGpu());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  const std::vector<Tokens> prompt = MakePrompt(4, 2, 80);
  engine.PublishPrompt(prompt);
  daemon.Kill();
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return engine.Reserve(ObjectKind::kSegment, MakeRun(9, 50)).granted(); }));
  engine.PublishPrompt(prompt);
  ExpectLands(engine, prompt);
}

// The hbm tier is on the GPU: objects are published there, tuples are read there, and evicted objects are promoted from
// below.
class GpuHbm : public GpuTest {
 protected:
  static DaemonOptions Options() {
    DaemonOptions options = WithGpu();
    options.gpu += "hbm: {capacity_bytes: 4MiB, arena_bytes: 2MiB}\n";
    options.ssd = "64MiB";
    options.admission = "all";
    return options;
  }
  static std::vector<TierKind> TiersOf(const Match& match) {
    std::vector<TierKind> tiers;
    for (const SegmentResult& segment : match.segments()) tiers.push_back(segment.tier);
    return tiers;
  }
};

TEST_F(GpuHbm, HoldsWhatEnginesPublishAndMap) {
  DaemonProcess daemon(Options());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  TestEngine other(daemon.client_options(), {}, Memory::kGpuRegistered);
  const std::vector<Tokens> prompt = MakePrompt(1, 3, 90);
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  EXPECT_THAT(TiersOf(match), Each(TierKind::kHbm));
  ASSERT_NE(match.tuples(1), nullptr);
  EXPECT_EQ((*match.tuples(1))[0].memory, kernels::MemoryKind::kDevice);
  for (TestEngine* reader : {&engine, &other}) ExpectLands(*reader, prompt);
}

TEST_F(GpuHbm, EvictedObjectsReloadFromLowerTiers) {
  DaemonProcess daemon(Options());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  std::vector<std::vector<Tokens>> prompts;
  for (uint64_t i = 0; i < 12; ++i) {
    prompts.push_back(MakePrompt(10 + i, 2, 100));
    engine.PublishPrompt(prompts.back());
    // Waits until copies of evictable objects are in the tier below.
    ASSERT_TRUE(Eventually([&] { return daemon.Metric("ashlar_tier_copies_in_progress") == 0; }));
  }
  bool from_below = false;
  for (const std::vector<Tokens>& prompt : prompts) {
    for (const TierKind tier : TiersOf(engine.Lookup(prompt))) from_below |= tier == TierKind::kDram;
    ExpectLands(engine, prompt);
  }
  EXPECT_TRUE(from_below);
}

TEST_F(GpuHbm, DiskObjectsSurviveDaemon) {
  DaemonProcess daemon(Options());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  const std::vector<Tokens> prompt = MakePrompt(5, 3, 80);
  engine.PublishPrompt(prompt);
  EXPECT_EQ(daemon.Terminate(), 0) << "it writes what is only in memory";
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return engine.Reserve(ObjectKind::kSegment, MakeRun(9, 50)).granted(); }));
  EXPECT_THAT(TiersOf(engine.Lookup(prompt)), Each(TierKind::kSsd));
  ExpectLands(engine, prompt);
}

// All regions of a session are on the GPU, or none.
TEST_F(GpuHbm, MixedCpuAndGpuRegionsAreRefusedByName) {
  DaemonProcess daemon(Options());
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  const auto there = Register(**client, 4096);
  ASSERT_TRUE(there.ok()) << there.status();
  const absl::Status refused = (*client)->HostRegion(4096).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(),
              HasSubstr("host_region: a session with a region on a GPU must have all regions on that GPU"));
  const int memfd = ::memfd_create("region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(memfd, 4096), 0);
  ASSERT_EQ(::fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_THAT((*client)->RegisterRegion(memfd, 4096).status().message(),
              HasSubstr("register_region.on_gpu: a session"));
  ::close(memfd);
  auto other = Client::Connect(daemon.client_options());
  ASSERT_TRUE(other.ok()) << other.status();
  const auto near = (*other)->HostRegion(4096);
  ASSERT_TRUE(near.ok()) << near.status();
  EXPECT_THAT(Register(**other, 4096).status().message(), HasSubstr("register_region.on_gpu: a session"));
}

// An object on the GPU is copied to dram for it.
TEST_F(GpuHbm, AnEngineInHostMemoryFindsGpuObjects) {
  DaemonProcess daemon(Options());
  TestEngine engine(daemon.client_options(), {}, Memory::kGpuRegistered);
  TestEngine host(daemon.client_options());
  const std::vector<Tokens> theirs = MakePrompt(6, 2, 60), ours = MakePrompt(7, 2, 70);
  engine.PublishPrompt(theirs);
  host.PublishPrompt(ours);
  for (TestEngine* reader : {&engine, &host}) {
    ExpectLands(*reader, theirs);
    ExpectLands(*reader, ours);
  }
  EXPECT_THAT(TiersOf(host.Lookup(theirs)), Each(TierKind::kDram));
  EXPECT_THAT(TiersOf(engine.Lookup(ours)), Each(TierKind::kHbm));
}

TEST_F(GpuTest, RegionsAreChargedAndGivenBack) {
  DaemonOptions options = WithGpu();
  options.sessions = "sessions: {region_bytes: 8MiB}\n";
  DaemonProcess daemon(options);
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  {
    const auto six = Register(**client, 6 << 20);
    ASSERT_TRUE(six.ok()) << six.status();
    EXPECT_EQ(six->size(), size_t{6} << 20);
    const auto more = Register(**client, 4 << 20);
    EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(more.status().message(), HasSubstr("register_region.bytes"));
    EXPECT_TRUE(Register(**client, 1).ok()) << "which is rounded up to what is left";
  }
  EXPECT_TRUE(Eventually([&] { return Register(**client, 8 << 20).ok(); })) << "what is dropped is given back";
}

TEST_F(GpuTest, RefusesDescriptorWithoutAllocation) {
  DaemonProcess daemon(WithGpu());
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  std::byte nowhere{};
  const absl::Status refused = (*client)->RegisterGpuRegion(pipe_ends[0], &nowhere, 2 << 20).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("register_region.descriptor: cuMem"));
  kernels::ArenaError error;
  const auto arena = gpu_->MakeArena(2 << 20, &error);
  ASSERT_NE(arena, nullptr) << error.message;
  const absl::Status longer =
      (*client)->RegisterGpuRegion(arena->descriptor(), arena->data(), 2 * arena->bytes()).status();
  EXPECT_EQ(longer.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*client)->RegisterGpuRegion(arena->descriptor(), arena->data(), arena->bytes()).ok());
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

TEST_F(GpuTest, TheDaemonAllocatesNoPagesOnTheGpu) {
  DaemonProcess daemon(WithGpu());
  TestEngine registered(daemon.client_options(), {}, Memory::kGpuRegistered);
  PagedCache pages = registered.pages();
  pages.allocate = true;
  EXPECT_THAT(registered.model().DeclarePages(registered.region(), pages).message(), HasSubstr("allocate"));
}

TEST(WithoutAGpu, GpuRegionsAreRefusedByName) {
  DaemonProcess daemon;
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  const int memfd = ::memfd_create("region", MFD_CLOEXEC);
  std::byte nowhere{};
  const absl::Status refused = (*client)->RegisterGpuRegion(memfd, &nowhere, 4096).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("register_region.on_gpu: the daemon has no GPU"));
  EXPECT_TRUE((*client)->HostRegion(4096).ok()) << "the session goes on";
  ::close(memfd);
}

TEST(WithoutAGpu, ADaemonConfiguredWithAGpuDoesNotStart) {
  DaemonOptions options = WithGpu();
  DaemonProcess daemon;
  daemon.Kill();
  options.gpu = "gpu: {device: 1000}\n";
  daemon.Configure(options);
  EXPECT_THAT(daemon.Refusal(), HasSubstr("gpu.device 1000: "));
}

}  // namespace
}  // namespace ashlar::integration
