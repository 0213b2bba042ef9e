// SPDX-License-Identifier: Apache-2.0
// The whole daemon: its metrics, how it ends, and the binary.
#include "daemon/daemon.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "daemon/session/region.h"
#include "daemon/testing/http_peer.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::vector<int32_t> Tokens(int count) {
  return std::vector<int32_t>(count, 42);
}

TEST(Metrics, CountEvents) {
  TestNode node("", "metrics_address: \"127.0.0.1:0\"");
  TestEngine engine(node);
  ASSERT_TRUE(engine.Match(Tokens(24), {24}).ok());
  ASSERT_EQ(engine.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  const auto match = engine.Match(Tokens(24), {24});
  ASSERT_TRUE(match.ok());
  EXPECT_THAT(*engine.Land(engine.LandRequest(match->lease(), {At(0, 0)})), ElementsAre(MissReason::kNone));

  const int port = node.daemon().metrics_port();
  ASSERT_GT(port, 0);
  // Levels are sampled a few times per second.
  std::string text;
  ASSERT_TRUE(Eventually([&] {
    text = Scrape(port);
    return text.find("\nashlar_leases 1\n") != std::string::npos &&
           text.find("\nashlar_landings_in_progress 0\n") != std::string::npos &&
           text.find("\nashlar_queue_depth{queue=\"workers\"} 0\n") != std::string::npos;
  }));
  for (const char* line : {
           "ashlar_hits_total{kind=\"checkpoint\",tenant=\"default\",tier=\"dram\"} 1\n",
           "ashlar_hit_tokens_total{kind=\"checkpoint\",tenant=\"default\",tier=\"dram\"} 24\n",
           "ashlar_misses_total{kind=\"checkpoint\",reason=\"never_seen\",tenant=\"default\"} 1\n",
           "ashlar_miss_tokens_total{kind=\"checkpoint\",reason=\"never_seen\",tenant=\"default\"} 24\n",
           "ashlar_published_objects_total{kind=\"checkpoint\",tenant=\"default\"} 1\n",
           "ashlar_published_bytes_total{kind=\"checkpoint\",tenant=\"default\"} ",
           "ashlar_landed_bytes_total{tenant=\"default\"} ",
           "ashlar_checksum_failures_total{tenant=\"default\"} 0\n",
           "ashlar_reservations_total{kind=\"checkpoint\",outcome=\"granted\",tenant=\"default\"} 1\n",
           "ashlar_region_bytes{tenant=\"default\"} 1048576\n",
           "ashlar_connections_rejected_total{reason=\"too_many\",socket=\"rpc\"} 0\n",
           "ashlar_tier_used_bytes{tenant=\"default\",tier=\"dram\"} 262144\n",
           "ashlar_tier_allocated_bytes{tenant=\"default\",tier=\"dram\"} 2097152\n",  // one arena in advance
           "ashlar_tier_capacity_bytes{tenant=\"default\",tier=\"dram\"} 16777216\n",
           "ashlar_objects 1\n",
           "ashlar_reservations_pending 0\n",
           "ashlar_landings_in_progress 0\n",
           "ashlar_sessions 1\n",
           "ashlar_queue_depth{queue=\"metadata\"} ",
           "ashlar_queue_depth{queue=\"workers\"} 0\n",
           "ashlar_queue_rejected_total{queue=\"metadata\"} 0\n",
           "ashlar_rpcs_total{code=\"OK\",method=\"Match\"} 2\n",
           "ashlar_rpc_duration_seconds_count{method=\"Land\"} 1\n",
           "ashlar_rpc_duration_seconds_bucket{method=\"Match\",le=\"+Inf\"} 2\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(Metrics, ReportEvictionAges) {
  TestNode node("", "metrics_address: \"127.0.0.1:0\"");
  TestEngine engine(node);
  // The first object is evicted when the budget of 64 extents is full.
  for (int text = 0; text <= 64; ++text) {
    ASSERT_EQ(engine.PublishRun(ObjectKind::kCheckpoint, Ascending(24, 100 * text)), PublishOutcome::kPublished);
  }
  const std::string text = Scrape(node.daemon().metrics_port());
  for (const char* line : {
           "ashlar_evictions_total{kind=\"checkpoint\",policy=\"price\",reason=\"evicted\",tenant=\"default\","
           "tier=\"dram\"} 1\n",
           "ashlar_eviction_age_seconds_count{policy=\"price\",tenant=\"default\",tier=\"dram\"} 1\n",
           "ashlar_eviction_age_seconds_bucket{policy=\"price\",tenant=\"default\",tier=\"dram\",le=\"60\"} 1\n",
           "ashlar_eviction_idle_seconds_count{policy=\"price\",tenant=\"default\",tier=\"dram\"} 1\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

// Storage does not see these landings; each of their segments is still a miss, and counted once.
TEST(Metrics, CountLandingsThatNeverStart) {
  TestNode node("", "metrics_address: \"127.0.0.1:0\"");
  TestEngine engine(node);
  ASSERT_EQ(engine.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  const auto match = engine.Match(Tokens(24), {24});
  ASSERT_TRUE(match.ok());
  const v1::LandRequest silenced = engine.LandRequest(match->lease(), {At(0, 0)});
  v1::QuiesceReply quiesced;
  ASSERT_TRUE(engine.Call(engine.QuiesceRequest(silenced.landing()), &quiesced).ok());
  EXPECT_THAT(*engine.Land(silenced), ElementsAre(MissReason::kCancelled));
  EXPECT_THAT(*engine.Land(engine.LandRequest(std::string(16, 'x'), {At(0, 0), At(1, 24)})),
              ElementsAre(MissReason::kLeaseLost, MissReason::kLeaseLost));

  const std::string text = Scrape(node.daemon().metrics_port());
  for (const char* line : {
           "ashlar_misses_total{kind=\"checkpoint\",reason=\"cancelled\",tenant=\"default\"} 1\n",
           "ashlar_miss_tokens_total{kind=\"checkpoint\",reason=\"cancelled\",tenant=\"default\"} 24\n",
           "ashlar_misses_total{kind=\"segment\",reason=\"lease_lost\",tenant=\"default\"} 2\n",
           "ashlar_miss_tokens_total{kind=\"segment\",reason=\"lease_lost\",tenant=\"default\"} 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

class MetricsEndpointTest : public ::testing::Test {
 protected:
  MetricsEndpointTest() { Require(mkdtemp(folder_.data()) != nullptr, "mkdtemp"); }
  ~MetricsEndpointTest() override { std::filesystem::remove_all(folder_); }

  std::string socket() const { return folder_ + "/metrics.sock"; }
  std::string listen(const std::string& more = "") const {
    return absl::StrCat("metrics_address: \"127.0.0.1:0\", metrics_socket: ", socket(), more);
  }
  mode_t mode() const {
    struct stat found;
    return stat(socket().c_str(), &found) == 0 ? found.st_mode & 07777 : 0;
  }

  std::string folder_ = "/tmp/ashlard_metrics_XXXXXX";
};

// Every user with an account on this machine can reach the address, and must not even learn that there are tenants.
TEST_F(MetricsEndpointTest, OnlyTheSocketNamesTenants) {
  const std::string tenants =
      absl::StrCat("tenants: [{name: indigo, uids: [", geteuid(), "], dram_bytes: 8MiB}, {name: violet, uids: [",
                   geteuid() + 1, "], dram_bytes: 4MiB}]\n");
  {
    TestNode node(tenants + "metrics: {}\n", listen());
    TestEngine engine(node);
    ASSERT_TRUE(engine.Match(Tokens(24), {24}).ok());
    const std::string open = Scrape(node.daemon().metrics_port());
    EXPECT_THAT(open, HasSubstr("\nashlar_misses_total{kind=\"checkpoint\",reason=\"never_seen\"} 1\n"));
    EXPECT_THAT(open, HasSubstr("\nashlar_tier_capacity_bytes{tier=\"dram\"} 12582912\n"));
    for (const char* secret : {"tenant=", "indigo", "violet"}) EXPECT_THAT(open, Not(HasSubstr(secret)));
    const std::string own = HttpPeer(socket()).Ask("/metrics");
    EXPECT_THAT(own, HasSubstr("tenant=\"indigo\"} 1\n"));
    EXPECT_THAT(own, HasSubstr("tenant=\"violet\""));
    EXPECT_EQ(mode(), 0600u);
  }
  EXPECT_FALSE(std::filesystem::exists(socket()));
  TestNode node(tenants + "metrics: {tenants: named}\n", listen(", metrics_socket_access: group"));
  EXPECT_THAT(Scrape(node.daemon().metrics_port()), HasSubstr("tenant=\"indigo\""));
  EXPECT_EQ(mode(), 0660u);
}

TEST_F(MetricsEndpointTest, ServesProbes) {
  TestNode node("", listen());
  for (const char* path : {"/healthz", "/readyz"}) {
    EXPECT_THAT(HttpPeer(node.daemon().metrics_port()).Ask(path), StartsWith("HTTP/1.1 200 ")) << path;
    EXPECT_THAT(HttpPeer(socket()).Ask(path), StartsWith("HTTP/1.1 200 ")) << path;
  }
  EXPECT_EQ(Health(node.rpc_socket(), ""), kServing);
  node.daemon().Drain(0, [] { return true; });
  EXPECT_THAT(HttpPeer(socket()).Ask("/healthz"), StartsWith("HTTP/1.1 200 ")) << "it need not be killed";
  const std::string ready = HttpPeer(socket()).Ask("/readyz");
  EXPECT_THAT(ready, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(ready, EndsWith("draining\n"));
  EXPECT_EQ(Health(node.rpc_socket(), ""), kNotServing);
}

TEST_F(MetricsEndpointTest, NamesAnAddressThatCannotBeBound) {
  TestNode node("", listen());
  const auto start = [&](const std::string& address, const std::string& path) {
    const std::string other = folder_ + "/other";
    v1::Config config;
    const absl::Status parsed = ParseConfig(
        absl::StrCat("listen: {rpc_socket: ", other, ".rpc, session_socket: ", other, ".session, metrics_address: \"",
                     address, "\", metrics_socket: ", path, "}\ndram: {capacity_bytes: 16MiB, arena_bytes: 1MiB}\n"),
        &config);
    Require(parsed.ok(), std::string(parsed.message()));
    return std::string(Daemon::Start(config).status().message());
  };
  EXPECT_THAT(start(absl::StrCat("127.0.0.1:", node.daemon().metrics_port()), folder_ + "/free"),
              StartsWith("listen.metrics_address: cannot listen on port "));
  EXPECT_THAT(start("127.0.0.1:0", socket()), StartsWith(absl::StrCat("listen.metrics_socket: ", socket())));
  EXPECT_THAT(start("127.0.0.1:0", "/nonexistent/metrics"), StartsWith("listen.metrics_socket: "));
  EXPECT_THAT(HttpPeer(socket()).Ask("/readyz"), EndsWith("ready\n")) << "the first goes on";
}

TEST(Daemon, StopsWithSessionsOpenAndRemovesItsSockets) {
  TestNode node;
  EXPECT_EQ(node.daemon().metrics_port(), 0);
  TestEngine engine(node);
  ASSERT_EQ(engine.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  node.Stop();
  EXPECT_TRUE(engine.socket().Closed());
  EXPECT_FALSE(std::filesystem::exists(node.rpc_socket()));
  EXPECT_FALSE(std::filesystem::exists(node.session_socket()));
  EXPECT_EQ(engine.Match(Tokens(24), {24}).status().code(), absl::StatusCode::kUnavailable);
  node.Stop();
}

TEST(Daemon, EnginesConnectAndLeaveWhileOthersWork) {
  TestNode node;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  std::atomic<int> landed{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; !stop; ++round) {
        TestEngine engine(node);
        const std::vector<int32_t> tokens(24, t * 1000 + round % 5);
        const v1::ReserveResult reserved = engine.Reserve(ObjectKind::kCheckpoint, tokens);
        if (reserved.reservation() != 0) {
          engine.Publish(engine.Sources(ObjectKind::kCheckpoint, reserved.reservation(), tokens.size()));
        }
        const auto match = engine.Match(tokens, {24});
        if (!match.ok() || match->lease().empty()) continue;
        const v1::LandRequest request = engine.LandRequest(match->lease(), {At(0, 0)});
        // Every other landing is cancelled at once, and every third session ends without notice.
        if (round % 2 == 0) {
          engine.LandAndCancel(request);
          v1::QuiesceReply reply;
          EXPECT_TRUE(engine.Call(engine.QuiesceRequest(request.landing()), &reply).ok());
        } else {
          const auto verdict = engine.Land(request);
          landed += verdict.ok() && (*verdict)[0] == MissReason::kNone;
        }
        if (round % 3 == 0) engine.socket().Close();
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return landed >= 10; }));
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(Region, IsUnloadedAfterTheLastUser) {
  auto region = *Region::Register(MakeMemfd(4096, F_SEAL_SHRINK), 4096);
  std::shared_ptr<const Region> in_flight = region;
  std::atomic<bool> gone{false};
  region->WhenGone([&] { gone = true; });
  region = nullptr;
  EXPECT_FALSE(gone);
  std::thread([transfer = std::move(in_flight)]() mutable { transfer = nullptr; }).join();
  EXPECT_TRUE(gone);
}

// The ashlard program, as an operator runs it.
class Binary {
 public:
  explicit Binary(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), ASHLARD);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) return;
    output_.Reset(pipe_fds[0]);
    UniqueFd write_end(pipe_fds[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, write_end.get(), 1);
    posix_spawn_file_actions_adddup2(&actions, write_end.get(), 2);
    if (posix_spawn(&pid_, ASHLARD, &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Binary() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    Wait();
  }

  void Signal(int number) { kill(pid_, number); }
  // The wait status.
  int Wait() {
    int status = -1;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  // All of its output, after its end.
  std::string Output() {
    std::string all;
    char buffer[4096];
    for (ssize_t size; (size = read(output_.get(), buffer, sizeof buffer)) > 0;) all.append(buffer, size);
    return all;
  }

 private:
  pid_t pid_ = -1;
  UniqueFd output_;
};

class BinaryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    config_ = folder_ + "/ashlard.yaml";
    std::ofstream(config_) << "listen: {rpc_socket: " << rpc() << ", session_socket: " << session()
                           << "}\ndram: {capacity_bytes: 16MiB, arena_bytes: 1MiB}\nlog: {format: json}\n";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string rpc() const { return folder_ + "/rpc.sock"; }
  std::string session() const { return folder_ + "/session.sock"; }
  bool Started() const {
    return Eventually([&] { return std::filesystem::exists(session()) && std::filesystem::exists(rpc()); });
  }

  std::string folder_ = "/tmp/ashlard_binary_XXXXXX";
  std::string config_;
};

TEST_F(BinaryTest, SigtermDrainsRemovesTheSocketsAndExitsZero) {
  for (int signal_number : {SIGTERM, SIGINT}) {
    Binary ashlard({"--config", config_});
    ASSERT_TRUE(Started());
    RawSession engine(session());
    ASSERT_TRUE(StatusOf(engine.Hello()).ok());
    ashlard.Signal(signal_number);
    const int status = ashlard.Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(engine.Closed());
    EXPECT_FALSE(std::filesystem::exists(rpc()));
    EXPECT_FALSE(std::filesystem::exists(session()));
    const std::string output = ashlard.Output();
    for (const char* message : {"daemon started", "session opened", "session closed", "daemon stopped"}) {
      EXPECT_THAT(output, HasSubstr(message));
    }
  }
}

TEST_F(BinaryTest, StartsAgainAfterKill9AndRefusesToStartTwice) {
  {
    Binary ashlard({"--config", config_});
    ASSERT_TRUE(Started());
    Binary second({"--config", config_});
    const int status = second.Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
    EXPECT_THAT(second.Output(), HasSubstr("another process is listening"));
    ASSERT_TRUE(StatusOf(RawSession(session()).Hello()).ok()) << "the first goes on";
    ashlard.Signal(SIGKILL);
    ashlard.Wait();
  }
  ASSERT_TRUE(std::filesystem::exists(session()));
  Binary again({"--config", config_});
  EXPECT_TRUE(Eventually([&] {
    const UniqueFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, session().c_str(), sizeof(address.sun_path) - 1);
    return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }));
  EXPECT_TRUE(StatusOf(RawSession(session()).Hello()).ok());
}

TEST_F(BinaryTest, FailsIfItsOutputCannotBeWritten) {
  for (const std::string& arguments : {std::string("--help"), "--check-config --config " + config_}) {
    const int status = std::system(absl::StrCat(ASHLARD, " ", arguments, " >/dev/full 2>/dev/null").c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << arguments << ": " << status;
  }
}

TEST_F(BinaryTest, BadArgumentsAndConfigurationsExitTwo) {
  const std::string bad = folder_ + "/bad.yaml";
  std::ofstream(bad) << "dram: {capacty_bytes: 4GiB}\n";
  const struct {
    std::vector<std::string> arguments;
    const char* output;
  } kCases[] = {
      {{}, "--config is required"},
      {{"--config"}, "--config: 1 required FILE.yaml missing"},
      {{"--cofnig", config_}, "--cofnig: unknown argument"},
      {{"--config", "/nonexistent.yaml"}, "cannot read /nonexistent.yaml"},
      {{absl::StrCat("--config=", bad)}, "dram.capacty_bytes: unknown field"},
  };
  for (const auto& c : kCases) {
    Binary ashlard(c.arguments);
    const int status = ashlard.Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
    EXPECT_THAT(ashlard.Output(), HasSubstr(c.output));
  }
}

TEST_F(BinaryTest, PrintsTheEffectiveConfiguration) {
  Binary ashlard({"--config", config_, "--check-config"});
  EXPECT_EQ(ashlard.Wait(), 0);
  const std::string output = ashlard.Output();
  EXPECT_THAT(output, HasSubstr("capacity_bytes: 16777216"));
  EXPECT_THAT(output, HasSubstr("unused_seconds: 60"));
  EXPECT_FALSE(std::filesystem::exists(session()));
}

}  // namespace
}  // namespace ashlar::daemon
