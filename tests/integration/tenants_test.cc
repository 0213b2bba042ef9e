// SPDX-License-Identifier: Apache-2.0
// Nothing crosses tenants: not by key, not by lease, not by descriptor.
#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>

#include "absl/strings/escaping.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::EndsWith;

constexpr uint32_t kOtherUser = 65531, kSameTenant = 65532, kStranger = 65533;

// Runs `work` as another user. The system call changes only the calling thread.
void AsUser(uid_t user, const std::function<void()>& work) {
  std::thread([&] {
    ASSERT_EQ(::syscall(SYS_setresuid, -1, user, -1), 0);
    work();
  }).join();
}

// A connection to the RPC socket by `user`.
std::shared_ptr<grpc::Channel> ConnectAs(uid_t user, const std::string& path) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  AsUser(user, [&] {
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(::connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
  });
  return grpc::CreateInsecureChannelFromFd("localhost", fd);
}

// The answer to CloseModel with a request of any bytes.
grpc::StatusCode CloseModelRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& bytes) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice slice(bytes);
  grpc::ByteBuffer reply;
  grpc::Status status;
  const auto call = stub.PrepareUnaryCall(&context, "/ashlar.v1.Cache/CloseModel", grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  call->Finish(&reply, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  return status.error_code();
}

class Tenants : public testing::Test {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
    daemon_ = std::make_unique<DaemonProcess>(
        DaemonOptions{.dram = "64MiB",
                      .arena = "4MiB",
                      .tenants = "tenants:\n"
                                 "  - {name: alpha, uids: [0, 65532], dram_bytes: 32MiB}\n"
                                 "  - {name: beta, uids: [65531], dram_bytes: 16MiB}\n"});
    engine_ = std::make_unique<TestEngine>(daemon_->client_options());
    engine_->PublishPrompt(prompt_);
  }

  std::string Other(const std::string& command, const std::string& lease = "", uint32_t uid = kOtherUser) {
    EngineProcess other(daemon_->client_options(), {command, "6", "3", "60", lease}, {.uid = uid});
    return other.ReadLine();
  }

  const std::vector<Tokens> prompt_ = MakePrompt(6, 3, 60);
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<TestEngine> engine_;
};

TEST_F(Tenants, SeeNothingOfEachOther) {
  EXPECT_EQ(engine_->client().tenant(), "alpha");
  const Match match = engine_->Lookup(prompt_);
  ASSERT_TRUE(match.segments()[1].hit());
  EXPECT_THAT(Other("match"), EndsWith("never_seen never_seen never_seen"));
  EXPECT_EQ(Other("attach", absl::BytesToHexString(match.lease())), "ok lease_lost lease_lost lease_lost");
  EXPECT_EQ(Other("attach", absl::BytesToHexString(match.lease()), 0), "ok none none none");  // the same tenant may
  EXPECT_EQ(Other("reserve"), "reserved granted granted granted");
}

TEST_F(Tenants, GetOnlyTheirOwnArenas) {
  EXPECT_EQ(Other("arenas"), "arenas 0");
  EXPECT_NE(Other("arenas", "", 0), "arenas 0");
}

// A session's secret is bound to the user that opened the session.
TEST_F(Tenants, AStolenSecretIsRefused) {
  RawSession session(daemon_->client_options());
  const std::string secret = session.Greet();
  const std::string rpc = daemon_->client_options().rpc_socket;
  const auto codes = [&](const std::shared_ptr<grpc::Channel>& channel) {
    v1::Cache::Stub stub(channel);
    std::vector<grpc::StatusCode> all;
    {
      v1::CloseModelRequest request;
      request.set_session(secret);
      v1::CloseModelReply reply;
      grpc::ClientContext context;
      all.push_back(stub.CloseModel(&context, request, &reply).error_code());
    }
    {
      v1::QuiesceRequest request;  // sessions that have ended may call, too
      request.set_session(secret);
      v1::QuiesceReply reply;
      grpc::ClientContext context;
      all.push_back(stub.Quiesce(&context, request, &reply).error_code());
    }
    v1::LandRequest request;
    request.set_session(secret);
    v1::LandEvent event;
    grpc::ClientContext context;
    const auto stream = stub.Land(&context, request);
    while (stream->Read(&event)) {
    }
    all.push_back(stream->Finish().error_code());
    return all;
  };
  EXPECT_THAT(codes(ConnectAs(0, rpc)),
              ElementsAre(grpc::OK, grpc::FAILED_PRECONDITION, grpc::INVALID_ARGUMENT));  // each reached its handler
  for (const uid_t user : {kOtherUser, kSameTenant}) {
    EXPECT_THAT(codes(ConnectAs(user, rpc)), Each(grpc::PERMISSION_DENIED)) << user;
  }
  // The thief's own secret comes first, and the parser takes the last one.
  std::unique_ptr<RawSession> thief;
  AsUser(kOtherUser, [&] { thief = std::make_unique<RawSession>(daemon_->client_options()); });
  v1::CloseModelRequest own, stolen;
  own.set_session(thief->Greet());
  stolen.set_session(secret);
  const auto channel = ConnectAs(kOtherUser, rpc);
  EXPECT_EQ(CloseModelRaw(channel, own.SerializeAsString()), grpc::OK);
  EXPECT_EQ(CloseModelRaw(channel, own.SerializeAsString() + stolen.SerializeAsString()), grpc::PERMISSION_DENIED);
  EXPECT_GE(daemon_->Metric("ashlar_rpcs_total{code=\"PERMISSION_DENIED\",method=\"Quiesce\"}"), 2);
  EXPECT_TRUE(Eventually([&] { return daemon_->log().find("belongs to another user") != std::string::npos; }));
}

TEST_F(Tenants, AUserOfNoTenantIsRefused) {
  EXPECT_EQ(Other("connect", "", kStranger), "PERMISSION_DENIED");
  EXPECT_EQ(Other("connect"), "OK");
}

}  // namespace
}  // namespace ashlar::integration
