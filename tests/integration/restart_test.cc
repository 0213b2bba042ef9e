// The daemon killed under load, again and again, on one disk: what that had acknowledged is found again and lands as it
// was published. And the disks that a daemon refuses.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ashlar/v1/admin.grpc.pb.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr std::byte kPoison{0x5a};
constexpr size_t kSegments = 3;
constexpr size_t kTokens = 60;
constexpr int kEngines = 2;
constexpr Shape kShape{.tokens = 256};
// Of one round. Each object takes an extent of 256 KiB: the disk holds three rounds, and memory a tenth of one.
constexpr size_t kPromptsPerRound = 110;
// What was used longest ago goes first, so that the disk gives up objects of earlier rounds alone. By price it may give
// up what it has acknowledged a moment ago, and nobody could tell that from a loss.
const DaemonOptions kSmallMemory{
    .dram = "8MiB", .arena = "1MiB", .ssd = "256MiB", .admission = "all", .eviction = "lru"};

// A prompt is its seed; a text one of its segments.
using Prompts = std::vector<uint64_t>;
using Texts = std::map<uint64_t, std::set<size_t>>;

std::vector<Tokens> PromptOf(uint64_t seed) {
  return MakePrompt(seed, kSegments, kTokens);
}

size_t Count(const Texts& texts) {
  size_t count = 0;
  for (const auto& [seed, segments] : texts) count += segments.size();
  return count;
}

bool HasDirectIo() {
  const int fd = ::open(testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

// Asks a daemon what its disk has acknowledged.
class Witness {
 public:
  Witness(const std::string& admin_socket, const NamespaceId& ns)
      : stub_(v1::Admin::NewStub(grpc::CreateChannel("unix:" + admin_socket, grpc::InsecureChannelCredentials()))),
        ns_(reinterpret_cast<const char*>(ns.bytes.data()), ns.bytes.size()) {}

  // Adds those texts of the prompts that the disk has acknowledged by now; false when the daemon does not answer.
  bool Hear(const Prompts& prompts, Texts& acknowledged) {
    v1::Texts request;
    request.set_tenant("default");
    request.set_ns(ns_);
    std::vector<std::pair<uint64_t, size_t>> asked;
    for (const uint64_t seed : prompts) {
      const std::vector<Tokens> prompt = PromptOf(seed);
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (acknowledged[seed].contains(i)) continue;
        v1::ObjectName* text = request.add_texts();
        text->set_kind(static_cast<uint32_t>(TestEngine::KindOf(i)));
        text->set_tokens(prompt[i].data(), prompt[i].size() * sizeof(int32_t));
        asked.emplace_back(seed, i);
      }
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::ExplainReply reply;
    if (!stub_->Explain(&context, request, &reply).ok()) return false;
    for (size_t i = 0; i < asked.size(); ++i) {
      const auto& tiers = reply.texts(static_cast<int>(i)).present().tiers();
      if (std::ranges::count(tiers, static_cast<uint32_t>(TierKind::kSsd)) == 0) continue;
      acknowledged[asked[i].first].insert(asked[i].second);
    }
    return true;
  }

 private:
  std::unique_ptr<v1::Admin::Stub> stub_;
  const std::string ns_;
};

// Lands the prompt, at the first attempt; what was landed must be what was published. True: all of `wanted` was.
bool Lands(TestEngine& engine, uint64_t seed, const std::set<size_t>& wanted) {
  const std::vector<Tokens> prompt = PromptOf(seed);
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  Landing landing = engine.Land(match, prompt);
  const std::vector<MissReason> reasons = landing.Wait(kPatience);
  EXPECT_TRUE(landing.WaitQuiet(kPatience));
  bool all = true;
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (reasons[i] == MissReason::kNone) {
      engine.ExpectTuples(match, i, prompt[i]);
      engine.ExpectLanded(TestEngine::KindOf(i), prompt[i], i * kTokens, kPoison);
    } else if (wanted.contains(i)) {
      const SegmentResult& segment = match.segments()[i];
      std::cout << "prompt " << seed << " missed segment " << i << ": looked up " << Name(segment.reason) << ", landed "
                << Name(reasons[i]) << std::endl;
      all = false;
    }
  }
  return all;
}

// Engines that publish new prompts and land those that there are, each in a thread of its own.
class Load {
 public:
  Load(const ClientOptions& options, std::mt19937_64& random) {
    for (int i = 0; i < kEngines; ++i) {
      threads_.emplace_back([this, options, seed = random()] { Work(options, seed); });
    }
    EXPECT_TRUE(Eventually([this] { return working_ == kEngines; }));
  }
  ~Load() { End(); }

  void End() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  Prompts prompts() const {
    const std::lock_guard lock(mutex_);
    return prompts_;
  }

 private:
  void Work(const ClientOptions& options, uint64_t seed) {
    std::mt19937_64 random(seed);
    TestEngine engine(options, kShape);
    ++working_;
    while (!over_ && !testing::Test::HasFailure()) {
      if (prompts().size() < kPromptsPerRound) Publish(engine, random() >> 32);
      const Prompts known = prompts();
      Lands(engine, known[random() % known.size()], {});
    }
  }

  // As far as it goes: the daemon may die meanwhile.
  void Publish(TestEngine& engine, uint64_t seed) {
    {
      const std::lock_guard lock(mutex_);
      prompts_.push_back(seed);
    }
    const std::vector<Tokens> prompt = PromptOf(seed);
    for (size_t i = 0; i < prompt.size() && !over_; ++i) {
      const ObjectKind kind = TestEngine::KindOf(i);
      const Reservation reservation = engine.Reserve(kind, prompt[i]);
      if (reservation.granted()) engine.model().Publish(reservation, engine.Compute(kind, prompt[i]));
    }
  }

  std::atomic<bool> over_ = false;
  std::atomic<int> working_ = 0;
  mutable std::mutex mutex_;
  Prompts prompts_;
  std::vector<std::thread> threads_;
};

// A field of the last line in which the daemon said what it found on its disk.
double Recovered(const DaemonProcess& daemon, const std::string& field) {
  const std::string log = daemon.log();
  const size_t line = log.rfind("disk read");
  const size_t at = line == std::string::npos ? line : log.find(" " + field + "=", line);
  EXPECT_NE(at, std::string::npos) << field;
  return at == std::string::npos ? -1 : std::strtod(log.c_str() + at + field.size() + 2, nullptr);
}

std::string MedianAndWorst(std::vector<double> figures) {
  std::ranges::sort(figures);
  std::ostringstream text;
  text << figures[figures.size() / 2] << " ms, worst " << figures.back() << " ms";
  return text.str();
}

class Kills {
 public:
  explicit Kills(uint32_t seed) : random_(seed) {}

  void Round() {
    Load load(daemon_.client_options(), random_);
    const Texts acknowledged = KillUnder(load);
    const auto killed = Clock::now();
    daemon_.Start();
    if (testing::Test::HasFatalFailure()) return;
    TestEngine engine(daemon_.client_options(), kShape);
    engine.Lookup(PromptOf(load.prompts().front()));
    answered_.push_back(std::chrono::duration<double, std::milli>(Clock::now() - killed).count());
    read_.push_back(Recovered(daemon_, "milliseconds"));
    EXPECT_EQ(Recovered(daemon_, "damaged"), 0);
    EXPECT_EQ(Recovered(daemon_, "over_budget"), 0);
    EXPECT_GE(Recovered(daemon_, "objects"), static_cast<double>(Count(acknowledged)));
    load.End();
    for (const auto& [seed, segments] : acknowledged) {
      ASSERT_TRUE(Lands(engine, seed, segments)) << "the disk had acknowledged a text that is lost";
      if (testing::Test::HasFailure()) return;
    }
    checked_ += Count(acknowledged);
  }

  size_t checked() const { return checked_; }
  std::string Report() const {
    std::ostringstream text;
    text << read_.size() << " kills, " << checked_ << " acknowledged objects found and landed; disk read in "
         << MedianAndWorst(read_) << "; from the kill to the first answered match " << MedianAndWorst(answered_);
    return text.str();
  }

 private:
  // Kills the daemon at a random moment; what its disk had acknowledged by then, as it said itself.
  Texts KillUnder(Load& load) {
    Texts acknowledged;
    const NamespaceId ns = engine_namespace_;
    std::thread witness([&] {
      Witness asks(daemon_.admin_socket(), ns);
      while (asks.Hear(load.prompts(), acknowledged)) {
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(30'000 + random_() % 500'000));
    daemon_.Kill();
    witness.join();
    return acknowledged;
  }

  std::mt19937_64 random_;
  DaemonProcess daemon_{kSmallMemory};
  const NamespaceId engine_namespace_ = TestEngine(daemon_.client_options(), kShape).model().ns();
  std::vector<double> read_, answered_;  // milliseconds
  size_t checked_ = 0;
};

TEST(Restart, WhatTheDiskHadAcknowledgedSurvivesTheDaemon) {
  if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
  const char* const asked = std::getenv("ASHLAR_KILLS");
  const int rounds = asked == nullptr ? 5 : std::atoi(asked);
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Kills kills(seed);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    kills.Round();
  }
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(kills.checked(), static_cast<size_t>(rounds)) << "the load never came to the disk";
  std::printf("%s\n", kills.Report().c_str());
}

// Writes over bytes of a file, and puts them back.
class Damage {
 public:
  Damage(const std::string& path, std::streamoff offset, const std::string& bytes) : path_(path), offset_(offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    original_.resize(bytes.size());
    file.seekg(offset).read(original_.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_NE(original_, bytes) << path;
    file.seekp(offset).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.flush()) << path;
  }
  ~Damage() {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset_).write(original_.data(), static_cast<std::streamsize>(original_.size()));
  }

 private:
  const std::string path_;
  const std::streamoff offset_;
  std::string original_;
};

TEST(Restart, RefusesADiskThatItCannotReadAndLeavesItAlone) {
  if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
  DaemonProcess daemon(kSmallMemory);
  constexpr uint64_t kSeed = 1;
  {
    TestEngine engine(daemon.client_options(), kShape);
    engine.PublishPrompt(PromptOf(kSeed));
    Witness witness(daemon.admin_socket(), engine.model().ns());
    Texts acknowledged;
    ASSERT_TRUE(Eventually([&] { return witness.Hear({kSeed}, acknowledged) && Count(acknowledged) == kSegments; }));
  }
  EXPECT_EQ(daemon.Terminate(), 0);
  const auto expect_refusal = [&](const std::string& why) {
    EXPECT_THAT(daemon.Refusal(), AllOf(HasSubstr("ssd.folder " + daemon.ssd_folder()), HasSubstr(why)));
  };
  const std::string slab = daemon.ssd_folder() + "/slab";
  {
    const Damage other_version(slab, 8, std::string("\1\0\0\0", 4));
    expect_refusal("version 1");
  }
  {
    const Damage other_name(slab, 16, "another's slab");
    expect_refusal("ssd slab");
  }
  {
    const Damage no_database(daemon.ssd_folder() + "/records/CURRENT", 0, "nonsense");
    expect_refusal(daemon.ssd_folder() + "/records");
  }
  daemon.Start();
  TestEngine engine(daemon.client_options(), kShape);
  EXPECT_TRUE(Lands(engine, kSeed, {0, 1, 2}));
}

}  // namespace
}  // namespace ashlar::integration
