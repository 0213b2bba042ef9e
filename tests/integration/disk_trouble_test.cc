// SPDX-License-Identifier: Apache-2.0
// A disk that is full, read-only, failing or hanging, at the daemon's start and while it runs: memory continues to
// serve, the tier reports that it is degraded, and recovers by itself.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <random>
#include <string>

#include "ashlar/v1/admin.grpc.pb.h"
#include "daemon/testing/node.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/disk_faults.h"
#include "tests/integration/disk_load.h"
#include "tests/integration/loop_disk.h"

namespace ashlar::integration {
namespace {

using daemon::Health;
using daemon::kNotServing;
using daemon::kServing;

constexpr const char* kDegraded = "ashlar_tier_degraded{tier=\"ssd\"}";
constexpr const char* kSsd = "ashlar.v1.Ssd";
constexpr const char* kSaidDegraded = "tier degraded";
constexpr const char* kSaidRecovered = "tier recovered";
const std::set<size_t> kAll = {0, 1, 2};

int Times(const char* variable, int fewer) {
  const char* const asked = std::getenv(variable);
  return asked == nullptr ? fewer : std::atoi(asked);
}

// A daemon with space for 80 objects on disk and 64 in memory.
DaemonOptions SmallDisk(const std::string& folder) {
  return {
      .dram = "16MiB", .arena = "1MiB", .ssd = "20MiB", .admission = "all", .eviction = "lru", .ssd_folder = folder};
}

class DiskTrouble : public ::testing::Test {
 protected:
  void Begin(const DaemonOptions& options) {
    daemon_.emplace(options);
    BeginEngine();
  }
  void BeginEngine() {
    engine_.emplace(daemon_->client_options(), kPromptShape);
    witness_.emplace(daemon_->admin_socket(), engine_->model().ns());
  }
  void KillAndStart() {
    engine_.reset();
    daemon_->Kill();
    degraded_ = false;
    daemon_->Start();
    if (!HasFatalFailure()) BeginEngine();
  }

  // The daemon continues to serve from memory; metrics, health and log report the tier's state.
  void ExpectDegraded() {
    EXPECT_TRUE(Eventually([&] { return daemon_->Metric(kDegraded) == 1; }));
    const std::string socket = daemon_->client_options().rpc_socket;
    EXPECT_TRUE(Eventually([&] { return Health(socket, kSsd) == kNotServing; }));
    EXPECT_EQ(Health(socket, ""), kServing);
    ExpectSaid(kSaidDegraded, said_degraded_);
    degraded_ = true;
    said_recovered_ = TimesSaid(kSaidRecovered);
    v1::StatsReply stats;
    grpc::ClientContext context;
    const auto admin =
        v1::Admin::NewStub(grpc::CreateChannel("unix:" + daemon_->admin_socket(), grpc::InsecureChannelCredentials()));
    EXPECT_TRUE(admin->Stats(&context, {}, &stats).ok());
    ASSERT_EQ(stats.degraded_size(), 1);
    EXPECT_NE(stats.degraded(0).reason(), "");
    ServeFromMemory();
  }
  void ServeFromMemory() {
    const uint64_t seed = Fresh();
    PublishWhatIsMissing(*engine_, seed);
    EXPECT_TRUE(Lands(*engine_, seed, kAll));
  }
  void ExpectRecovery() {
    EXPECT_TRUE(Eventually([&] { return daemon_->Metric(kDegraded) == 0; })) << daemon_->log();
    EXPECT_TRUE(Eventually([&] { return Health(daemon_->client_options().rpc_socket, kSsd) == kServing; }));
    if (degraded_) ExpectSaid(kSaidRecovered, said_recovered_);
    degraded_ = false;
  }
  // Expects one more such line in the log than at the last call. `said`: the count then, updated to the current one.
  void ExpectSaid(const std::string& words, size_t& said) {
    EXPECT_TRUE(Eventually([&] { return TimesSaid(words) > said; })) << words << ", " << said << " times before";
    said = TimesSaid(words);
  }
  size_t TimesSaid(const std::string& words) {
    size_t times = 0;
    const std::string log = daemon_->log();
    for (size_t at = log.find(words); at != std::string::npos; at = log.find(words, at + 1)) ++times;
    return times;
  }
  // Publishes until the disk has refused something.
  void PublishUntilDegraded() {
    for (int i = 0; i < 12 && daemon_->Metric(kDegraded) == 0; ++i) {
      written_.push_back(Fresh());
      PublishWhatIsMissing(*engine_, written_.back());
      Eventually([&] { return daemon_->Metric(kDegraded) == 1; }, std::chrono::milliseconds(500));
    }
  }
  // Used objects are written to the disk one after another, as space becomes free.
  void ExpectWritten(uint64_t seed) {
    EXPECT_TRUE(Eventually([&] {
      PublishWhatIsMissing(*engine_, seed);
      Lands(*engine_, seed, {});
      return witness_->Hear({seed}, acknowledged_) && acknowledged_[seed] == kAll;
    }));
  }
  // Checks once that everything acknowledged before is there.
  void ExpectNothingLost() {
    witness_->Hear(written_, acknowledged_);
    for (const auto& [seed, segments] : acknowledged_) {
      EXPECT_TRUE(Lands(*engine_, seed, segments)) << "the disk had acknowledged a text that is lost";
    }
    landed_ += Count(acknowledged_);
  }

  // Restarts with an empty disk before the disk has to evict, which could not be distinguished from a loss.
  void BeginAnewIfFull(const std::string& folder) {
    if (Count(acknowledged_) <= 40) return;
    engine_.reset();
    daemon_->Kill();
    std::filesystem::remove_all(folder);
    daemon_->Start();
    written_.clear();
    acknowledged_.clear();
    if (!HasFatalFailure()) BeginEngine();
  }

  uint64_t Fresh() { return random_() >> 32; }

  std::mt19937_64 random_{std::random_device{}()};
  std::optional<DaemonProcess> daemon_;
  std::optional<TestEngine> engine_;
  std::optional<Witness> witness_;
  Prompts written_;
  Texts acknowledged_;
  size_t landed_ = 0;
  size_t said_degraded_ = 0, said_recovered_ = 0;
  bool degraded_ = false;  // since its last start, and no recovery reported
};

class FullDisk : public DiskTrouble {
 protected:
  void SetUp() override {
    if (const std::string why = LoopDisk::WhyNot(); !why.empty()) GTEST_SKIP() << why;
    disk_.emplace();
    folder_ = disk_->path() + "/ssd";
  }
  void TearDown() override {
    engine_.reset();
    daemon_.reset();
  }

  // The disk becomes full between two of the daemon's steps.
  void FillNow() {
    daemon_->Freeze();
    disk_->TrimLogs(folder_ + "/records");
    disk_->Fill();
    daemon_->Thaw();
  }
  void Round(bool restart) {
    FillNow();
    PublishUntilDegraded();
    ExpectDegraded();
    if (restart) {
      KillAndStart();
      ASSERT_FALSE(HasFatalFailure());
      ExpectDegraded();
    }
    disk_->Empty();
    ExpectRecovery();
    written_.push_back(Fresh());
    ExpectWritten(written_.back());
    ExpectNothingLost();
  }

  std::optional<LoopDisk> disk_;
  std::string folder_;
};

TEST_F(FullDisk, ServesAndRetriesOnFullDisk) {
  disk_->Fill();
  Begin(SmallDisk(folder_));
  if (HasFatalFailure()) return;
  ExpectDegraded();
  disk_->Empty();
  ExpectRecovery();
  const int rounds = Times("ASHLAR_FULL_DISKS", 3);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    BeginAnewIfFull(folder_);
    Load load(daemon_->client_options(), random_, /*most_prompts=*/2);
    Round(/*restart=*/round % 3 == 1);
    load.End();
  }
  std::printf("%d times full, %zu acknowledged objects found and landed\n", rounds + 1, landed_);
}

TEST_F(FullDisk, AReadOnlyDiskIsWrittenAgainOnceItIsWritable) {
  Begin(SmallDisk(folder_));
  written_.push_back(Fresh());
  ExpectWritten(written_.back());
  engine_.reset();
  EXPECT_EQ(daemon_->Terminate(), 0);
  disk_->Remount("ro");
  daemon_->Start();
  if (HasFatalFailure()) return;
  BeginEngine();
  ExpectDegraded();
  disk_->Remount("rw");
  ExpectRecovery();
  EXPECT_TRUE(Eventually([&] { return Lands(*engine_, written_[0], kAll); }));
  ServeFromMemory();
}

TEST_F(FullDisk, ReadOnlyDiskLosesNoAcknowledgedObject) {
  Begin(SmallDisk(folder_));
  if (HasFatalFailure()) return;
  written_.push_back(Fresh());
  ExpectWritten(written_.back());
  Load load(daemon_->client_options(), random_, /*most_prompts=*/4);
  disk_->Abort();
  PublishUntilDegraded();
  ExpectDegraded();
  ExpectNothingLost();
  load.End();
  engine_.reset();
  daemon_->Kill();
  degraded_ = false;
  disk_->MountAgain();
  daemon_->Start();
  if (HasFatalFailure()) return;
  BeginEngine();
  ExpectRecovery();
  ExpectNothingLost();
  written_.push_back(Fresh());
  ExpectWritten(written_.back());
}

// Not under sanitizers, whose libraries must be loaded before all others.
class FailingDisk : public DiskTrouble {
 protected:
  void SetUp() override {
    if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
    if (std::string(DISK_FAULTS).empty()) GTEST_SKIP() << "a sanitizer takes no library before its own";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    const std::string control = folder_ + "/faults";
    const int fd = ::open(control.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(::ftruncate(fd, sizeof(DiskFaults)), 0);
    void* const shared = ::mmap(nullptr, sizeof(DiskFaults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    ASSERT_NE(shared, MAP_FAILED);
    faults_ = static_cast<DiskFaults*>(shared);
    options_ = SmallDisk(folder_ + "/ssd");
    options_.environment = {"LD_PRELOAD=" DISK_FAULTS, "ASHLAR_DISK_FAULTS=" + control,
                            "ASHLAR_DISK_FOLDER=" + folder_ + "/ssd"};
  }
  void TearDown() override {
    engine_.reset();
    daemon_.reset();
    if (faults_ != nullptr) ::munmap(faults_, sizeof(DiskFaults));
    std::filesystem::remove_all(folder_);
  }
  void Set(int read, int write, int sync, int change) {
    faults_->read = read;
    faults_->write = write;
    faults_->sync = sync;
    faults_->change = change;
  }

  std::string folder_ = testing::TempDir() + "ashlar-failing-XXXXXX";
  DaemonOptions options_;
  DiskFaults* faults_ = nullptr;
};

TEST_F(FailingDisk, AffectsOnlyTheDisk) {
  struct Case {
    const char* what;
    int read, write, sync, change;
  };
  const Case cases[] = {{"writes fail", 0, EIO, 0, 0},
                        {"syncs fail", 0, 0, EIO, 0},
                        {"full", 0, ENOSPC, 0, ENOSPC},
                        {"read-only", 0, EROFS, 0, EROFS},
                        {"all of it fails", EIO, EIO, EIO, EIO}};
  Begin(options_);
  if (HasFatalFailure()) return;
  const int rounds = Times("ASHLAR_FULL_DISKS", 5);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    const Case& next = cases[round % std::size(cases)];
    SCOPED_TRACE(next.what);
    BeginAnewIfFull(folder_ + "/ssd");
    Load load(daemon_->client_options(), random_, /*most_prompts=*/2);
    Set(next.read, next.write, next.sync, next.change);
    PublishUntilDegraded();
    ExpectDegraded();
    Set(0, 0, 0, 0);
    ExpectRecovery();
    // Objects acknowledged before are not lost either, although they could not be read for a while: none was read
    // meanwhile.
    written_.push_back(Fresh());
    ExpectWritten(written_.back());
    ExpectNothingLost();
    load.End();
  }
  std::printf("%d times failing, %d calls; %zu acknowledged objects found and landed\n", rounds, faults_->struck.load(),
              landed_);
}

TEST_F(FailingDisk, AnUnreadableRecordLogAffectsOnlyTheDisk) {
  Begin(options_);
  written_.push_back(Fresh());
  ExpectWritten(written_.back());
  engine_.reset();
  daemon_->Kill();
  Set(EIO, 0, 0, 0);
  daemon_->Start();
  if (HasFatalFailure()) return;
  BeginEngine();
  ExpectDegraded();
  EXPECT_THAT(daemon_->log(), ::testing::ContainsRegex("[.]log: read: [^\n]*Input/output error"));
  Set(0, 0, 0, 0);
  ExpectRecovery();
  EXPECT_TRUE(Eventually([&] { return Lands(*engine_, written_[0], kAll); }));
}

TEST_F(FailingDisk, IsOpenedAfterRecovery) {
  Begin(options_);
  written_.push_back(Fresh());
  ExpectWritten(written_.back());
  for (const int error : {EIO, ENOSPC, EROFS}) {
    SCOPED_TRACE(error);
    engine_.reset();
    daemon_->Kill();
    Set(error == EIO ? EIO : 0, error, error, error);
    daemon_->Start();
    if (HasFatalFailure()) return;
    BeginEngine();
    ExpectDegraded();
    Set(0, 0, 0, 0);
    ExpectRecovery();
    EXPECT_TRUE(Eventually([&] { return Lands(*engine_, written_[0], kAll); }));
  }
}

// A disk that hangs: its calls do not return.
class HangingDisk : public FailingDisk {
 protected:
  using Seconds = std::chrono::duration<double>;
  static constexpr Seconds kDegradedWithin{10}, kLandedWithin{5}, kStoppedWithin{2};
  static constexpr int kStuck = 3;  // exit code

  void SetUp() override {
    FailingDisk::SetUp();
    options_.drain_seconds = 1;
  }
  void TearDown() override {
    if (faults_ != nullptr) faults_->hang = 0;
    FailingDisk::TearDown();
  }
  // A text that only the disk has.
  void BeginWithOneText() {
    Begin(options_);
    if (HasFatalFailure()) return;
    written_.push_back(Fresh());
    ExpectWritten(written_.back());
    KillAndStart();
  }
  void Hang() {
    begin_ = std::chrono::steady_clock::now();
    faults_->hang = 1;
  }
  Seconds Since() const { return std::chrono::steady_clock::now() - begin_; }
  // By SIGTERM, within the grace period and two seconds.
  void ExpectEnd(int code) {
    begin_ = std::chrono::steady_clock::now();
    EXPECT_EQ(daemon_->Terminate(), code);
    const Seconds took = Since();
    EXPECT_LE(took, Seconds(options_.drain_seconds) + kStoppedWithin);
    std::printf("stopped %.2f s after SIGTERM; grace period %u s\n", took.count(), options_.drain_seconds);
  }

 private:
  std::chrono::steady_clock::time_point begin_;
};

TEST_F(HangingDisk, CostsMissesUntilItAnswers) {
  BeginWithOneText();
  if (HasFatalFailure()) return;
  Hang();
  const std::vector<Tokens> prompt = PromptOf(written_[0]);
  const Match match = engine_->Lookup(prompt);
  EXPECT_EQ(match.segments()[0].tier, TierKind::kSsd);
  Landing landing = engine_->Land(match, prompt);
  EXPECT_THAT(landing.Wait(kPatience), ::testing::Each(MissReason::kTierError));
  const Seconds landed = Since();
  EXPECT_LE(landed, kLandedWithin);
  EXPECT_TRUE(landing.WaitQuiesced(kPatience));
  ExpectDegraded();
  EXPECT_LE(Since(), kDegradedWithin);
  EXPECT_GT(faults_->hung, 0);
  std::printf("landing answered after %.2f s\n", landed.count());
  const Match missed = engine_->Lookup(prompt);
  for (const SegmentResult& segment : missed.segments()) {
    EXPECT_EQ(segment.reason, MissReason::kTierError);
  }
  PublishWhatIsMissing(*engine_, written_[0]);
  EXPECT_TRUE(Lands(*engine_, written_[0], kAll)) << "memory takes it again";
  const Prompts others = {Fresh()};
  faults_->hang = 0;
  ExpectRecovery();
  EXPECT_TRUE(Lands(*engine_, written_[0], kAll));
  ExpectWritten(others[0]);
}

TEST_F(HangingDisk, DoesNotDelayTheDaemonsStop) {
  BeginWithOneText();
  if (HasFatalFailure()) return;
  Hang();
  PublishWhatIsMissing(*engine_, Fresh());
  EXPECT_TRUE(Eventually([&] { return faults_->hung > 0; })) << "it is written";
  ExpectEnd(kStuck);
  EXPECT_THAT(daemon_->log(), ::testing::ContainsRegex("the disk hangs; [^\n]*thread=disk stuck=[1-9]"));
  faults_->hang = 0;
  daemon_->Start();
  if (HasFatalFailure()) return;
  degraded_ = false;
  BeginEngine();
  EXPECT_TRUE(Lands(*engine_, written_[0], kAll)) << "acknowledged before";
}

// Nothing was in flight: it is closing its files.
TEST_F(HangingDisk, DoesNotDelayTheDaemonsStopWhileClosing) {
  BeginWithOneText();
  if (HasFatalFailure()) return;
  engine_.reset();
  Hang();
  ExpectEnd(kStuck);
  EXPECT_THAT(daemon_->log(), ::testing::HasSubstr("did not stop in time"));
}

TEST_F(HangingDisk, DoesNotDelayTheDaemonsStart) {
  BeginWithOneText();
  if (HasFatalFailure()) return;
  engine_.reset();
  daemon_->Kill();
  Hang();
  daemon_->Start();
  if (HasFatalFailure()) return;
  EXPECT_LE(Since(), kDegradedWithin);
  std::printf("serving %.2f s after its start\n", Since().count());
  BeginEngine();
  ExpectDegraded();
  faults_->hang = 0;
  ExpectRecovery();
  EXPECT_TRUE(Eventually([&] { return Lands(*engine_, written_[0], kAll); }));
}

}  // namespace
}  // namespace ashlar::integration
