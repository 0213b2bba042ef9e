// SPDX-License-Identifier: Apache-2.0
// The emulated network of these tests: TCP observes the configured faults of its links.
#include "tests/nodes/network.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <random>

#include "daemon/testing/child_process.h"
#include "tests/integration/daemon_process.h"
#include "tests/nodes/traffic.h"

namespace ashlar::nodes {
namespace {

using daemon::ChildProcess;
using integration::Eventually;
using integration::InNetworkNamespace;
using integration::NetworkNamespace;
using std::chrono::milliseconds;

constexpr uint64_t kMiB = 1 << 20;

class NetworkTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Network::WhyNot(); !why.empty()) GTEST_SKIP() << why;
  }
  const uint64_t seed_ = std::random_device{}();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, seed_};
};

// Seconds to carry `bytes`, which must all arrive.
double Timed(Connection* connection, uint64_t bytes, uint64_t seed) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(connection->Carry(bytes, seed), bytes);
  EXPECT_TRUE(connection->equal());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST_F(NetworkTest, CarriesBytesBetweenAllNodes) {
  Network network({.nodes = 3});
  for (size_t from = 0; from < 3; ++from) {
    Connection connection(network, from, (from + 1) % 3);
    Timed(&connection, 4 * kMiB, seed_ + from);
    EXPECT_GE(network.counts(from, (from + 1) % 3).bytes, 4 * kMiB);
  }
  EXPECT_EQ(network.oversized(), 0u);
}

// Prints the throughput of each kind of connection, which depends on the machine's other load.
TEST_F(NetworkTest, EveryKindOfNetworkCarriesAndCountsBytes) {
  for (const NetworkOptions& options :
       {NetworkOptions{.relay = false}, NetworkOptions{}, NetworkOptions{.mtu = 9'000}}) {
    Network network(options);
    Connection connection(network, 0, 1);
    constexpr uint64_t kBytes = 128 * kMiB;
    const double seconds = Timed(&connection, kBytes, seed_);
    std::vector<double> trips;
    for (int i = 0; i < 101; ++i)
      trips.push_back(std::chrono::duration<double, std::micro>(connection.RoundTrip()).count());
    std::nth_element(trips.begin(), trips.begin() + 50, trips.end());
    std::printf("%s, frames of %zu bytes: %.2f Gbit/s one way, round trip %.0f us (median)\n",
                options.relay ? "relay" : "bridge", options.mtu, kBytes * 8e-9 / seconds, trips[50]);
    if (options.relay) {
      EXPECT_EQ(network.oversized(), 0u);
    }
  }
}

TEST_F(NetworkTest, OnePercentLossLosesNoByte) {
  Network network;
  network.SetAll({.loss = 0.01});
  Connection connection(network, 0, 1);
  Timed(&connection, 8 * kMiB, seed_);
  const LinkCounts counts = network.counts(0, 1);
  EXPECT_GT(counts.lost, 0u);
  EXPECT_LT(counts.lost, counts.delivered / 10);
}

TEST_F(NetworkTest, DuplicatesAndReorderingCostNoByte) {
  Network network;
  network.SetAll({.duplicate = 0.05, .reorder = 0.05, .hold_back = milliseconds(1)});
  Connection connection(network, 0, 1);
  Timed(&connection, 8 * kMiB, seed_);
  EXPECT_GT(network.counts(0, 1).duplicated, 0u);
  EXPECT_GT(network.counts(0, 1).reordered, 0u);
}

// Individual frames: TCP hides what arrived twice, late, or never.
class Datagrams {
 public:
  explicit Datagrams(const Network& network) {
    for (size_t node = 0; node < 2; ++node) {
      const InNetworkNamespace there(network.stack(node));
      sockets_[node] = OpenDatagrams(Network::address(node), 4000);
    }
    ConnectTo(sockets_[0], Network::address(1), 4000);
  }
  ~Datagrams() {
    for (const int fd : sockets_) ::close(fd);
  }
  void Send(char byte) { EXPECT_EQ(::send(sockets_[0], &byte, 1, 0), 1); }
  bool Receive(char* byte) { return ::recv(sockets_[1], byte, 1, MSG_DONTWAIT) == 1; }
  char Next() {
    char byte = 0;
    EXPECT_TRUE(Eventually([&] { return Receive(&byte); }));
    return byte;
  }

 private:
  int sockets_[2];
};

TEST_F(NetworkTest, DuplicatesArriveTwiceAndHeldFramesArrive) {
  Network network;
  Datagrams datagrams(network);
  network.SetLink(0, 1, {.duplicate = 1});
  datagrams.Send('a');
  EXPECT_EQ(datagrams.Next(), 'a');
  EXPECT_EQ(datagrams.Next(), 'a');
  network.SetLink(0, 1, {.reorder = 1, .hold_back = milliseconds(300)});
  datagrams.Send('b');
  EXPECT_TRUE(Eventually([&] { return network.counts(0, 1).reordered == 1; }));
  network.SetLink(0, 1, {});
  datagrams.Send('c');
  EXPECT_EQ(datagrams.Next(), 'c');
  EXPECT_EQ(datagrams.Next(), 'b');
}

TEST_F(NetworkTest, ACutLosesFramesInFlight) {
  Network network;
  Datagrams datagrams(network);
  network.SetLink(0, 1, {.reorder = 1, .hold_back = milliseconds(500)});
  datagrams.Send('a');
  EXPECT_TRUE(Eventually([&] { return network.counts(0, 1).reordered == 1; }));
  EXPECT_EQ(network.counts(0, 1).cut, 0u);
  network.SetLink(0, 1, {.cut = true});
  EXPECT_TRUE(Eventually([&] { return network.counts(0, 1).cut == 1; }));
  network.Heal();
  datagrams.Send('b');
  EXPECT_EQ(datagrams.Next(), 'b');
}

TEST_F(NetworkTest, TheSameSeedLosesTheSameFrames) {
  std::string came[2];
  for (std::string& text : came) {
    Network network({.seed = 1 + seed_});
    Datagrams datagrams(network);
    for (char name = 'a'; name <= 'z'; ++name) {
      network.SetLink(0, 1, {.loss = 0.5});
      const LinkCounts before = network.counts(0, 1);
      datagrams.Send(name);
      const auto decided = [&] { return network.counts(0, 1).lost + network.counts(0, 1).delivered; };
      EXPECT_TRUE(Eventually([&] { return decided() > before.lost + before.delivered; }));
    }
    network.Heal();
    datagrams.Send('.');
    for (char byte = 0; byte != '.' && !HasFailure();) text.push_back(byte = datagrams.Next());
  }
  EXPECT_EQ(came[0], came[1]);
  EXPECT_GT(came[0].size(), 1u);
  EXPECT_LT(came[0].size(), 27u);
}

TEST_F(NetworkTest, ADelayIsSeenEachWay) {
  Network network;
  Connection connection(network, 0, 1);
  network.SetLink(0, 1, {.delay = milliseconds(200)});
  EXPECT_GE(connection.RoundTrip(), milliseconds(200));
  network.SetBetween(0, 1, {.delay = milliseconds(200)});
  EXPECT_GE(connection.RoundTrip(), milliseconds(400));
  network.Heal();
  // A machine that hangs for long may spoil one, not all.
  EXPECT_TRUE(Eventually([&] { return connection.RoundTrip() < milliseconds(200); }));
}

TEST_F(NetworkTest, ACutLinkStallsAndRecovers) {
  Network network({.nodes = 3});
  Connection connection(network, 0, 1), other(network, 0, 2);
  network.SetBetween(0, 1, {.cut = true});
  EXPECT_EQ(connection.Carry(1, seed_, milliseconds(500)), 0u);
  Timed(&other, kMiB, seed_);
  network.Heal();
  char byte;
  EXPECT_EQ(::recv(connection.far(), &byte, 1, 0), 1) << "it is sent again";
  Timed(&connection, kMiB, seed_);
  EXPECT_GT(network.counts(0, 1).cut, 0u);
}

TEST_F(NetworkTest, ALinkIsCutOneWay) {
  Network network;
  Connection there(network, 0, 1), back(network, 1, 0);
  network.SetLink(0, 1, {.cut = true});
  EXPECT_EQ(there.Carry(1, seed_, milliseconds(300)), 0u);
  const uint64_t acknowledgements = network.counts(0, 1).cut;
  EXPECT_EQ(back.Carry(1, seed_), 1u) << "the other direction carries";
  EXPECT_TRUE(Eventually([&] { return network.counts(0, 1).cut > acknowledgements; })) << "and is not acknowledged";
}

TEST_F(NetworkTest, AThrottleKeepsItsRate) {
  Network network;
  Connection connection(network, 0, 1);
  constexpr uint64_t kRate = 4 * kMiB;
  network.SetLink(0, 1, {.bytes_per_second = kRate});
  const double seconds = Timed(&connection, 8 * kMiB, seed_);
  EXPECT_GT(seconds, 0.9 * 8 * kMiB / kRate);
  // TCP fills the available rate, though slowly on a machine with other work.
  EXPECT_LT(seconds, 10.0 * 8 * kMiB / kRate);
}

TEST_F(NetworkTest, TwoNetworksAreSeparate) {
  Network first, second;
  first.SetAll({.cut = true});
  Connection connection(second, 0, 1);
  Timed(&connection, kMiB, seed_);
  EXPECT_EQ(first.counts(0, 1).delivered, 0u);
}

// One end of a pair in a namespace of this test, the other in one of the network: it is removed with that stack.
bool Tie(const NetworkNamespace& here, const std::string& stack) {
  ChildProcess ip;
  ip.Start({.command = {"ip", "link", "add", "tie", "type", "veth", "peer", "name", "tied", "netns", stack},
            .network_namespace = here.fd()});
  return ip.Wait() == 0;
}
bool Tied(const NetworkNamespace& here) {
  ChildProcess ip;
  ip.Start({.command = {"ip", "link", "show", "dev", "tie"}, .log = "/dev/null", .network_namespace = here.fd()});
  return ip.Wait() == 0;
}

TEST_F(NetworkTest, NetworkLeavesNothingBehind) {
  NetworkNamespace here;
  {
    Network network;
    ASSERT_TRUE(Tie(here, network.path(1)));
    EXPECT_TRUE(Tied(here));
  }
  EXPECT_TRUE(Eventually([&] { return !Tied(here); }));
}

TEST_F(NetworkTest, KilledTestLeavesNothingBehind) {
  NetworkNamespace here;
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  const pid_t test = ::fork();
  if (test == 0) {
    Network network({.relay = false});  // no thread: ThreadSanitizer allows none after a fork
    ChildProcess inside;
    inside.Start({.command = {"sleep", "600"}, .network_namespace = network.stack(1)});
    const std::string line = std::to_string(inside.pid()) + " " + network.path(1) + "\n";
    if (::write(pipe[1], line.data(), line.size()) < 0) ::_exit(1);
    ::pause();
  }
  char text[200] = {};
  ASSERT_GT(::read(pipe[0], text, sizeof text - 1), 0);
  for (const int fd : pipe) ::close(fd);
  const std::string line = text;
  const std::string inside = "/proc/" + line.substr(0, line.find(' ')) + "/comm";
  ASSERT_TRUE(Tie(here, line.substr(line.find(' ') + 1, line.find('\n') - line.find(' ') - 1)));
  EXPECT_TRUE(std::filesystem::exists(inside));
  ::kill(test, SIGKILL);
  EXPECT_EQ(::waitpid(test, nullptr, 0), test);
  EXPECT_TRUE(Eventually([&] { return !Tied(here); }));
  EXPECT_TRUE(Eventually([&] { return !std::filesystem::exists(inside); }));
}

TEST_F(NetworkTest, TheMachinesNetworkIsUnchanged) {
  const auto devices = [] {
    std::ifstream file("/proc/thread-self/net/dev");
    size_t lines = 0;
    for (std::string line; std::getline(file, line);) {
      lines += line.find("port0:") != std::string::npos || line.find("switch:") != std::string::npos;
    }
    return lines;
  };
  EXPECT_EQ(devices(), 0u);
  Network relayed, bridged({.relay = false});
  EXPECT_EQ(devices(), 0u);
  const InNetworkNamespace there(bridged.stack(0));
  EXPECT_EQ(devices(), 0u);
}

TEST(ClockOffTest, AProgramsClockIsAnHourOff) {
  const std::vector<std::string> environment = ClockOff("+1h");
  if (environment.empty()) GTEST_SKIP() << "faketime is not installed, or a sanitizer keeps it out";
  const std::string log = testing::TempDir() + "ashlar-clock-" + std::to_string(::getpid());
  ChildProcess date;
  date.Start({.command = {"date", "+%s"}, .environment = environment, .log = log});
  EXPECT_EQ(date.Wait(), 0);
  int64_t seconds = 0;
  std::ifstream(log) >> seconds;
  EXPECT_NEAR(static_cast<double>(seconds), static_cast<double>(::time(nullptr)) + 3'600, 300);
  std::filesystem::remove(log);
}

}  // namespace
}  // namespace ashlar::nodes
