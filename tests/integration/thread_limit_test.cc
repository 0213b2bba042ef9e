// SPDX-License-Identifier: Apache-2.0
// Thread limits: reported by name at the start, and harmless afterwards.
#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "ashlar/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::Each;
using testing::HasSubstr;

// The limit counts all threads of a user, and the two tests may run in parallel: each has its own.
constexpr uid_t kLimitedUser = 65527, kDaemonUser = 65528, kOtherTenant = 65531;
constexpr uint32_t kGraceSeconds = 1;

DaemonOptions Options(uid_t user) {
  return {.tenants =
              "tenants:\n  - {name: alpha, uids: [0], dram_bytes: 32MiB}\n  - {name: beta, uids: [65531], "
              "dram_bytes: 16MiB}\n",
          .ssd = "64MiB",
          .drain_seconds = kGraceSeconds,
          .uid = user};
}

size_t Threads(pid_t pid) {
  const std::filesystem::directory_iterator tasks("/proc/" + std::to_string(pid) + "/task"), end;
  return static_cast<size_t>(std::distance(tasks, end));
}

class ThreadLimit : public testing::Test {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
  }

  static void AsUser(uid_t user, const std::function<void()>& work) {
    std::thread([&] {  // the system call itself changes only this thread
      ASSERT_EQ(::syscall(SYS_setresuid, -1, user, -1), 0);
      work();
    })
        .join();
  }
  static std::shared_ptr<grpc::Channel> Connect(const std::string& path) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(::connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    return grpc::CreateInsecureChannelFromFd("localhost", fd);
  }
  static milliseconds SlowestCall(TestEngine& engine, const std::vector<Tokens>& prompt) {
    milliseconds slowest{0};
    for (int i = 0; i < 100; ++i) {
      const auto begun = steady_clock::now();
      EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
      slowest = std::max(slowest, std::chrono::duration_cast<milliseconds>(steady_clock::now() - begun));
    }
    return slowest;
  }
};

TEST_F(ThreadLimit, LowLimitIsReportedAtStart) {
  DaemonProcess daemon(Options(kLimitedUser));
  const size_t threads = Threads(daemon.pid());
  EXPECT_EQ(daemon.Terminate(), 0);
  for (const uint64_t limit : {uint64_t{2}, uint64_t{threads / 2}, uint64_t{threads - 1}}) {
    DaemonOptions limited = Options(kLimitedUser);
    limited.max_threads = limit;
    daemon.Configure(limited);
    EXPECT_THAT(daemon.Refusal(),
                testing::AllOf(HasSubstr("threads: the daemon starts up to"),
                               HasSubstr("the limit of user 65527 (RLIMIT_NPROC) is " + std::to_string(limit))));
  }
}

// No further thread can be started, and one tenant's load stalls neither the other nor the stop.
TEST_F(ThreadLimit, ReachingItLaterStallsNoEngine) {
  DaemonProcess daemon(Options(kDaemonUser));
  const std::vector<Tokens> prompt = MakePrompt(8, 2, 40);
  TestEngine victim(daemon.client_options());
  victim.PublishPrompt(prompt);
  const milliseconds alone = SlowestCall(victim, prompt);
  std::thread([&] {  // as the daemon's user, who may lower it
    const struct rlimit none = {.rlim_cur = 1, .rlim_max = 1};
    ASSERT_EQ(::syscall(SYS_setresuid, kDaemonUser, kDaemonUser, kDaemonUser), 0);
    ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_NPROC, &none, nullptr), 0);
  })
      .join();

  constexpr int kChannels = 24, kThreads = 6;
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  std::unique_ptr<RawSession> session;
  AsUser(kOtherTenant, [&] {
    session = std::make_unique<RawSession>(daemon.client_options());
    for (int i = 0; i < kChannels; ++i) channels.push_back(Connect(daemon.client_options().rpc_socket));
  });
  const std::string secret = session->Greet();
  std::atomic<bool> stop{false};
  std::atomic<int> served{0}, failed{0};
  std::vector<std::jthread> load;
  for (int i = 0; i < kThreads; ++i) {
    load.emplace_back([&, i] {
      std::vector<std::unique_ptr<v1::Cache::Stub>> stubs;
      for (int j = i; j < kChannels; j += kThreads) stubs.push_back(v1::Cache::NewStub(channels[j]));
      v1::CloseModelRequest request;
      request.set_session(secret);
      for (size_t at = 0; !stop; at = (at + 1) % stubs.size()) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
        v1::CloseModelReply reply;
        ++(stubs[at]->CloseModel(&context, request, &reply).ok() ? served : failed);
      }
    });
  }
  const size_t before = Threads(daemon.pid());
  const milliseconds attacked = SlowestCall(victim, prompt);
  EXPECT_LE(attacked, 5 * alone + milliseconds(20));
  EXPECT_TRUE(Eventually([&] { return served > 2000 || failed > 0; }));
  EXPECT_EQ(failed, 0) << served << " were served";
  EXPECT_LE(Threads(daemon.pid()), before);

  const auto begun = steady_clock::now();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << "with the load still there";
  const auto took = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begun);
  stop = true;
  EXPECT_LE(took, std::chrono::seconds(kGraceSeconds + 2));
  std::printf("slowest call alone %d ms, beside the load %d ms; %d calls served; stopped in %d ms\n",
              static_cast<int>(alone.count()), static_cast<int>(attacked.count()), served.load(),
              static_cast<int>(took.count()));
}

}  // namespace
}  // namespace ashlar::integration
