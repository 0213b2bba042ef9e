// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/testing/process_figures.h"

namespace ashlar::daemon {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr size_t kHeld = 16 << 20;

std::vector<std::byte> RandomBytes(size_t size, std::mt19937_64& random) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(random());
  return bytes;
}

void Await(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class TransportTest : public testing::Test {
 protected:
  TransportTest() {
    holder_ = StartOne("127.0.0.1");
    asker_ = StartOne("127.0.0.1");
    RecordProperty("seed", std::to_string(seed_));
  }
  ~TransportTest() override {
    if (HasFailure()) std::printf("seed %lu\n", static_cast<unsigned long>(seed_));
  }
  std::unique_ptr<Transport> StartOne(const char* host) {
    TransportOptions options = options_;
    options.listen = {host, 0};
    auto started = Transport::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    return *std::move(started);
  }

  absl::Status Fetch(const Grant& grant, uint64_t offset, Spans targets, int64_t deadline = 0) {
    Outcome outcome;
    asker_->Fetch(holder_->address(), grant, offset, std::move(targets), deadline, outcome.done());
    return outcome.Wait();
  }
  static void Quiesce(Transport& transport, const Grant& grant) {
    std::promise<void> quiesced;
    transport.Revoke(grant.number, [&] { quiesced.set_value(); });
    quiesced.get_future().wait();
  }

  const uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  TransportOptions options_;
  std::unique_ptr<Transport> holder_, asker_;
};

// Landings of this node's engines have priority if CPUs are scarce.
TEST_F(TransportTest, ThreadYieldsToOthers) {
  const auto above = [] {
    std::set<int> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      if (name != "transport") continue;
      const auto thread = static_cast<id_t>(std::stoul(task.path().filename()));
      found.insert(getpriority(PRIO_PROCESS, thread) - getpriority(PRIO_PROCESS, 0));
    }
    return found;
  };
  const std::set<int> expected = {std::min(5, 19 - getpriority(PRIO_PROCESS, 0))};
  // The threads name themselves when they run first.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (above() != expected && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(above(), expected);
}

TEST_F(TransportTest, FetchesAnySizeOverAnySpans) {
  std::vector<size_t> sizes = {1, 2, 4095, 256 * 1024, 256 * 1024 + 1, 8 << 20};
  for (int i = 0; i < 20; ++i) sizes.push_back(1 + random_() % (size_t{1} << (1 + random_() % 23)));
  for (const size_t size : sizes) {
    const size_t longest = std::max<size_t>(size / (1 + random_() % 50), 1);
    std::vector<std::byte> there = RandomBytes(size, random_), here(size);
    const Grant read = holder_->Allow(size, std::make_shared<HeldBytes>(Scatter<std::byte>(there, longest, random_)));
    const uint64_t offset = random_() % size, length = 1 + random_() % (size - offset);
    ASSERT_TRUE(Fetch(read, 0, Scatter<std::byte>(here, longest, random_)).ok()) << size;
    EXPECT_TRUE(here == there) << size;
    std::vector<std::byte> part(length);
    ASSERT_TRUE(Fetch(read, offset, {part}).ok());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), there.begin() + offset)) << size << " " << offset;
    Quiesce(*holder_, read);
  }
  const TransportStats stats = holder_->stats();
  EXPECT_EQ(stats.served, 2 * sizes.size());
  EXPECT_EQ(stats.malformed + stats.refused + stats.late, 0u);
}

// The check of a daemon's open files and mappings depends on this (daemon/peer/channels/peer_bounds.h). Both ends of
// each connection are in this process.
TEST_F(TransportTest, AConnectionTakesTwoFilesAtEachEnd) {
  constexpr size_t kPeers = 24, kBytes = 2 << 20;
  std::vector<std::byte> there = RandomBytes(kBytes, random_), here(kBytes);
  std::vector<std::unique_ptr<Transport>> holders;
  for (size_t i = 0; i < kPeers; ++i) holders.push_back(StartOne("127.0.0.1"));
  const size_t files = OpenFilesOfThisProcess();
  [[maybe_unused]] const size_t mappings = MappingsOfThisProcess();
  for (const auto& holder : holders) {
    const Grant read = holder->Allow(kBytes, std::make_shared<HeldBytes>(Spans{there}));
    Outcome fetched;
    asker_->Fetch(holder->address(), read, 0, {here}, 0, fetched.done());
    ASSERT_TRUE(fetched.Wait().ok());
  }
  EXPECT_LE(OpenFilesOfThisProcess(), files + 2 * 2 * kPeers);
#ifndef __SANITIZE_THREAD__     // its shadow memory takes additional mappings
  constexpr size_t kHeaps = 8;  // threads create them meanwhile
  EXPECT_LE(MappingsOfThisProcess(), mappings + kHeaps + 2 * kPeers);
#endif
}

TEST_F(TransportTest, ManyInFlightFromSeveralThreads) {
  constexpr size_t kBytes = 300'000;
  std::vector<std::byte> there = RandomBytes(kBytes, random_);
  const Grant read = holder_->Allow(kBytes, std::make_shared<HeldBytes>(Scatter<std::byte>(there, 100'000, random_)));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, seed = random_()] {
      std::mt19937_64 random(seed);
      std::vector<std::vector<std::byte>> here;
      std::vector<uint64_t> offsets;
      std::vector<Outcome> outcomes(50);
      for (Outcome& outcome : outcomes) {
        offsets.push_back(random() % kBytes);
        here.emplace_back(1 + random() % (kBytes - offsets.back()));
        asker_->Fetch(holder_->address(), read, offsets.back(), {here.back()}, 0, outcome.done());
      }
      for (size_t i = 0; i < outcomes.size(); ++i) {
        EXPECT_TRUE(outcomes[i].Wait().ok());
        EXPECT_TRUE(std::equal(here[i].begin(), here[i].end(), there.begin() + offsets[i]));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(asker_->stats().fetched, 200u);
}

TEST_F(TransportTest, BytesInFlightAreBounded) {
  options_.bytes_in_flight = options_.bytes_in_flight_of_a_peer = 1 << 20;
  options_.requests = 10;
  asker_ = StartOne("127.0.0.1");
  std::vector<std::byte> there = RandomBytes(600'000, random_), here(600'000);
  const auto held = std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kLater);
  const Grant read = holder_->Allow(there.size(), held);
  std::vector<Outcome> outcomes(11);
  for (Outcome& each : outcomes) asker_->Fetch(holder_->address(), read, 0, {here}, 0, each.done());
  EXPECT_EQ(outcomes[10].Wait().code(), absl::StatusCode::kResourceExhausted);
  held->WaitUntilAsked(1);
  TransportStats stats = asker_->stats();
  ASSERT_EQ(stats.peers.size(), 1u);
  EXPECT_EQ(stats.peers[0].bytes_in_flight, 600'000u);  // a second one would exceed 1 MiB
  EXPECT_EQ(stats.peers[0].waiting, 9u);
  for (size_t i = 0; i < 10; ++i) {
    held->WaitUntilAsked(i + 1);
    held->Answer();
    EXPECT_TRUE(outcomes[i].Wait().ok());
  }
  EXPECT_TRUE(here == there);
  EXPECT_EQ(asker_->stats().peers[0].bytes_in_flight, 0u);
}

TEST_F(TransportTest, AnswersLaterAndWithErrors) {
  std::vector<std::byte> there = RandomBytes(5000, random_), here(5000);
  const auto later = std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kLater);
  const Grant read = holder_->Allow(there.size(), later);
  Outcome outcome;
  asker_->Fetch(holder_->address(), read, 0, {here}, 0, outcome.done());
  later->WaitUntilAsked(1);
  EXPECT_FALSE(outcome.IsThere());
  std::thread([&] { later->Answer(); }).join();
  EXPECT_TRUE(outcome.Wait().ok());
  EXPECT_TRUE(here == there);

  const Grant damaged =
      holder_->Allow(there.size(), std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kWithError));
  const absl::Status status = Fetch(damaged, 0, {here});
  EXPECT_EQ(status, absl::DataLossError("the copy is damaged"));
  // An owner that names too few bytes.
  const Grant more = holder_->Allow(6000, std::make_shared<HeldBytes>(Spans{there}));
  std::vector<std::byte> too_many(6000);
  EXPECT_EQ(Fetch(more, 0, {too_many}).code(), absl::StatusCode::kInternal);
}

TEST_F(TransportTest, ADeadlineEndsARequestAndNothingIsWrittenLater) {
  std::vector<std::byte> there = RandomBytes(5000, random_), here(5000);
  const auto later = std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kLater);
  const Grant read = holder_->Allow(there.size(), later);
  EXPECT_EQ(Fetch(read, 0, {here}, 20 * kMillisecond).code(), absl::StatusCode::kDeadlineExceeded);
  later->WaitUntilAsked(1);
  // The answer is late, and no byte is sent. The next fetch on the same connection shows that it was handled.
  later->Answer();
  std::vector<std::byte> other(5000);
  const Grant again = holder_->Allow(there.size(), std::make_shared<HeldBytes>(Spans{there}));
  EXPECT_TRUE(Fetch(again, 0, {other}).ok());
  EXPECT_TRUE(here == std::vector<std::byte>(5000));
  Quiesce(*holder_, read);  // the late answer's bytes may still be on their way out
}

TEST_F(TransportTest, CancelsInTheMiddle) {
  constexpr size_t kBytes = 4 << 20;
  std::vector<std::byte> there = RandomBytes(kBytes, random_);
  const Grant read = holder_->Allow(kBytes, std::make_shared<HeldBytes>(Spans{there}));
  for (int i = 0; i < 30; ++i) {
    std::vector<std::byte> here(kBytes);
    Outcome outcome;
    const uint64_t request = asker_->Fetch(holder_->address(), read, 0, {here}, 0, outcome.done());
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 3000));
    asker_->Cancel(request);
    const absl::Status status = outcome.Wait();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    // The memory belongs to another owner from now on. The sanitizers and these bytes reveal any write to it.
    std::fill(here.begin(), here.end(), std::byte{0x5a});
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{0x5a}), kBytes);
  }
  std::fill(there.begin(), there.end(), std::byte{1});
  std::vector<std::byte> here(kBytes);
  EXPECT_TRUE(Fetch(read, 0, {here}).ok());
  EXPECT_TRUE(here == there);
  Quiesce(*holder_, read);
}

TEST_F(TransportTest, ARevokedGrantFailsRequestsInFlight) {
  constexpr size_t kBytes = 8 << 20;
  for (int i = 0; i < 20; ++i) {
    auto there = std::make_unique<std::vector<std::byte>>(kBytes, std::byte{7});
    std::vector<std::byte> here(kBytes);
    const Grant read = holder_->Allow(kBytes, std::make_shared<HeldBytes>(Spans{*there}));
    Outcome outcome;
    asker_->Fetch(holder_->address(), read, 0, {here}, 0, outcome.done());
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 3000));
    Quiesce(*holder_, read);
    std::fill(there->begin(), there->end(), std::byte{9});  // reused
    there.reset();
    const absl::Status status = outcome.Wait();
    EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status)) << status;
    EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{9}), 0);
    if (status.ok()) {
      EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{7}), kBytes);
    }
    EXPECT_TRUE(absl::IsPermissionDenied(Fetch(read, 0, {here})));
  }
}

TEST_F(TransportTest, AHolderThatEndsFailsOnlyItsOwnRequests) {
  constexpr size_t kBytes = 8 << 20;
  std::vector<std::byte> there = RandomBytes(kBytes, random_), other(kBytes);
  auto second = StartOne("127.0.0.1");
  const auto later = std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kLater);
  const Grant hanging = holder_->Allow(kBytes, later);
  const Grant good = second->Allow(kBytes, std::make_shared<HeldBytes>(Spans{there}));
  std::vector<std::byte> here(kBytes);
  Outcome lost, unharmed;
  asker_->Fetch(holder_->address(), hanging, 0, {here}, 0, lost.done());
  later->WaitUntilAsked(1);
  asker_->Fetch(second->address(), good, 0, {other}, 0, unharmed.done());
  const HostPort old = holder_->address();
  holder_.reset();
  EXPECT_TRUE(absl::IsUnavailable(lost.Wait()));
  EXPECT_TRUE(unharmed.Wait().ok()) << unharmed.Wait();
  EXPECT_TRUE(other == there);

  // Nothing listens: the fetch is refused, at once or after a growing pause. Then a server listens.
  Outcome nobody;
  asker_->Fetch(old, hanging, 0, {here}, 0, nobody.done());
  EXPECT_TRUE(absl::IsUnavailable(nobody.Wait()));
  options_.listen = old;
  auto again = Transport::Start(options_);
  ASSERT_TRUE(again.ok()) << again.status();
  const Grant fresh = (*again)->Allow(kBytes, std::make_shared<HeldBytes>(Spans{there}));
  Await([&] {
    Outcome outcome;
    asker_->Fetch(old, fresh, 0, {here}, 0, outcome.done());
    return outcome.Wait().ok();
  });
  EXPECT_TRUE(here == there);
}

// The holder of the next test, in a separate process: prints its address and grants, and waits for its end.
TEST(TransportHolder, ServesFetches) {
  const char* const to = std::getenv("ASHLAR_TEST_HOLDER");
  if (to == nullptr) GTEST_SKIP() << "started by AKilledOrStoppedHolderIsDetected";
  auto transport = Transport::Start({});
  ASSERT_TRUE(transport.ok());
  std::vector<std::byte> bytes(kHeld, std::byte{0x11});
  const Grant grant = (*transport)->Allow(kHeld, std::make_shared<HeldBytes>(Spans{bytes}));
  const uint16_t port = (*transport)->address().port;
  ASSERT_EQ(write(std::atoi(to), &port, sizeof port), static_cast<ssize_t>(sizeof port));
  ASSERT_EQ(write(std::atoi(to), &grant, sizeof grant), static_cast<ssize_t>(sizeof grant));
  for (;;) pause();
}

// The kernel of a stopped holder still answers.
TEST_F(TransportTest, AKilledOrStoppedHolderIsDetected) {
  options_.silence = 300 * kMillisecond;
  asker_ = StartOne("127.0.0.1");
  for (const int signal : {SIGKILL, SIGSTOP}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const std::string variable = "ASHLAR_TEST_HOLDER=" + std::to_string(ends[1]);
    const pid_t child = fork();
    if (child == 0) {
      const char* const arguments[] = {"test", "--gtest_filter=TransportHolder.ServesFetches", nullptr};
      const char* const environment[] = {variable.c_str(), nullptr};
      execve("/proc/self/exe", const_cast<char**>(arguments), const_cast<char**>(environment));
      _exit(1);
    }
    close(ends[1]);
    HostPort peer{"127.0.0.1", 0};
    Grant grant;
    ASSERT_EQ(read(ends[0], &peer.port, sizeof peer.port), static_cast<ssize_t>(sizeof peer.port));
    ASSERT_EQ(read(ends[0], &grant, sizeof grant), static_cast<ssize_t>(sizeof grant));
    close(ends[0]);

    std::vector<std::byte> here(kHeld);
    Outcome whole, cut;
    asker_->Fetch(peer, grant, 0, {here}, 0, whole.done());
    EXPECT_TRUE(whole.Wait().ok());
    EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{0x11}), static_cast<ptrdiff_t>(kHeld));
    kill(child, signal);
    asker_->Fetch(peer, grant, 0, {here}, 0, cut.done());
    const absl::Status status = cut.Wait();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    const auto untouched = std::vector<std::byte>(kHeld, std::byte{0x22});
    here = untouched;
    if (signal == SIGSTOP) kill(child, SIGCONT);  // later messages have no recipient
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(here == untouched);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    EXPECT_GE(asker_->stats().peers[0].failures, 1u);
  }
}

TEST_F(TransportTest, SleepsWhenIdle) {
  std::vector<std::byte> there = RandomBytes(5000, random_), here(5000);
  const Grant read = holder_->Allow(5000, std::make_shared<HeldBytes>(Spans{there}));
  ASSERT_TRUE(Fetch(read, 0, {here}).ok());  // the connections exist
  const auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  const auto before = used();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(used() - before, std::chrono::milliseconds(50));  // two spinning threads would use up to 1,000
}

TEST_F(TransportTest, ReportsLanesOfPeers) {
  std::vector<std::byte> there = RandomBytes(5000, random_), here(5000);
  const Grant read = holder_->Allow(5000, std::make_shared<HeldBytes>(Spans{there}));
  ASSERT_TRUE(Fetch(read, 0, {here}).ok());
  for (const auto* each : {&holder_, &asker_}) {
    const TransportStats stats = (*each)->stats();
    ASSERT_EQ(stats.peers.size(), 1u);
    EXPECT_EQ(stats.peers[0].lanes, "tcp/lo.0");
    EXPECT_TRUE(stats.peers[0].connected);
    EXPECT_EQ(stats.peers[0].accepted, each == &holder_);
    EXPECT_FALSE(stats.rdma_fallback);
  }
  options_.expect_rdma = true;
  EXPECT_TRUE(StartOne("127.0.0.1")->stats().rdma_fallback);
}

TEST_F(TransportTest, AppliesSettingsAndRefusesFixedOnes) {
  options_.ucx = {{"UCX_TCP_RX_SEG_SIZE", "512k"}};
  const auto settings = StartOne("127.0.0.1")->settings();
  const auto value = [&](const std::string& name) {
    for (const UcxSetting& each : settings) {
      if (each.name == name) return each.value + " by " + each.from;
    }
    return std::string("none");
  };
  EXPECT_EQ(value("UCX_TLS"), "tcp,self by ashlar");
  EXPECT_EQ(value("UCX_TCP_TX_SEG_SIZE"), "260k by ashlar");
  EXPECT_EQ(value("UCX_TCP_RX_SEG_SIZE"), "512k by configuration");
  EXPECT_EQ(value("UCX_NET_DEVICES"), "lo by ashlar");
  options_.ucx = {{"UCX_TLS", "all"}};
  EXPECT_EQ(Transport::Start(options_).status().message(), "UCX_TLS: the daemon sets this variable itself; remove it");
  options_.ucx = {};
  options_.listen.host = "nowhere";
  EXPECT_EQ(Transport::Start(options_).status().message(), "nowhere: expected an IPv4 or IPv6 address");
}

}  // namespace
}  // namespace ashlar::daemon
