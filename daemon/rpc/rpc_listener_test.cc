// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/rpc_listener.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/testing/node.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

UniqueFd Connect(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return socket;
}

// Connects as another user, which only root can do. The system call itself changes only the calling thread.
UniqueFd ConnectAs(uid_t uid, const std::string& path) {
  UniqueFd socket;
  std::thread([&] {
    ASSERT_EQ(syscall(SYS_setresuid, -1, uid, -1), 0);
    socket = Connect(path);
  }).join();
  return socket;
}

// Returns whether the daemon has closed its end. Received bytes are dropped.
bool Closed(const UniqueFd& socket) {
  char bytes[256];
  ssize_t got;
  while ((got = recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT)) > 0) {
  }
  return got == 0 || errno == ECONNRESET;
}

class RpcListenerTest : public ::testing::Test {
 protected:
  static constexpr storage::TenantId kTenant = 7;

  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override {
    listener_ = nullptr;
    std::filesystem::remove_all(folder_);
  }
  void Listen(std::map<uid_t, storage::TenantId> tenant_of_uid, size_t of_a_user) {
    auto listener = RpcListener::Start(path_ = folder_ + "/rpc.sock",
                                       {std::move(tenant_of_uid), of_a_user, [this](uid_t, bool) { ++refused_; }},
                                       [this](UniqueFd socket, uid_t user) {
                                         MutexLock lock(mutex_);
                                         admitted_.push_back(std::move(socket));
                                         users_.push_back(user);
                                       });
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
    ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  }
  bool Admits(size_t connections) {
    return Eventually([&] {
      MutexLock lock(mutex_);
      return admitted_.size() == connections;
    });
  }

  std::string folder_ = "/tmp/ashlard_listener_XXXXXX", path_;
  Mutex mutex_;
  std::atomic<int> refused_{0};
  std::vector<UniqueFd> admitted_ ABSL_GUARDED_BY(mutex_);
  std::vector<uid_t> users_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<RpcListener> listener_;
};

TEST_F(RpcListenerTest, ConnectionsPerUserAreBounded) {
  Listen({{geteuid(), kTenant}}, 2);
  UniqueFd first = Connect(path_), second = Connect(path_);
  ASSERT_TRUE(Admits(2));
  const UniqueFd third = Connect(path_);
  EXPECT_TRUE(Eventually([&] { return Closed(third); }));
  EXPECT_EQ(refused_, 1);
  EXPECT_FALSE(Closed(first));

  // Either end may close: the engine,
  first.Reset();
  size_t admitted = 2;
  const auto enters = [&] {
    return Eventually([&] {
      const UniqueFd again = Connect(path_);
      return Eventually([&] {
               MutexLock lock(mutex_);
               return Closed(again) || admitted_.size() > admitted;
             }) &&
             !Closed(again);
    });
  };
  EXPECT_TRUE(enters());
  // like gRPC, which shuts down sockets before it closes them
  {
    MutexLock lock(mutex_);
    admitted = admitted_.size();
    shutdown(admitted_[1].get(), SHUT_RDWR);
    admitted_[1].Reset();
  }
  EXPECT_TRUE(Eventually([&] { return Closed(second); }));
  EXPECT_TRUE(enters());
  MutexLock lock(mutex_);
  EXPECT_THAT(users_, ::testing::Each(geteuid()));
}

TEST_F(RpcListenerTest, ConnectionsOfUnknownUsersAreBounded) {
  Listen({{geteuid() + 1, kTenant}}, 100);
  std::vector<UniqueFd> held;
  for (size_t i = 0; i < RpcListener::kPerUnknownUser; ++i) held.push_back(Connect(path_));
  ASSERT_TRUE(Admits(RpcListener::kPerUnknownUser));
  const UniqueFd refused = Connect(path_);
  EXPECT_TRUE(Eventually([&] { return Closed(refused); }));
  MutexLock lock(mutex_);
  EXPECT_THAT(users_, ::testing::Each(geteuid()));
}

TEST_F(RpcListenerTest, TheNewestUnknownUserReplacesTheOldest) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be several users";
  Listen({{geteuid(), kTenant}}, 100);
  const UniqueFd engine = Connect(path_);
  std::vector<UniqueFd> held;
  for (size_t i = 0; i < RpcListener::kMaxUnknownUserConnections; ++i) held.push_back(ConnectAs(1000 + i / 4, path_));
  ASSERT_TRUE(Admits(1 + RpcListener::kMaxUnknownUserConnections));
  EXPECT_FALSE(Closed(held[0]));
  const UniqueFd probe = ConnectAs(5000, path_);
  ASSERT_TRUE(Admits(2 + RpcListener::kMaxUnknownUserConnections));
  EXPECT_TRUE(Eventually([&] { return Closed(held[0]); })) << "the oldest gives way";
  EXPECT_FALSE(Closed(held[1]));
  EXPECT_FALSE(Closed(probe));
  EXPECT_FALSE(Closed(engine)) << "an engine does not";
}

// All users may query health; only tenants may use the cache.
TEST(RpcServer, UnknownUsersMayOnlyCheckHealth) {
  TestNode node(absl::StrCat("tenants: [{name: other, uids: [", geteuid() + 1, "], dram_bytes: 16MiB}]"));
  EXPECT_EQ(Health(node.rpc_socket(), "ashlar.v1.Cache"), kServing);
  EXPECT_EQ(Health(node.rpc_socket(), ""), kServing);
  const auto stub = v1::Cache::NewStub(
      grpc::CreateChannel(absl::StrCat("unix:", node.rpc_socket()), grpc::InsecureChannelCredentials()));
  v1::QuiesceRequest request;
  v1::QuiesceReply reply;
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub->Quiesce(&context, request, &reply).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
  request.set_daemon_epoch(std::string(1 << 20, 'x'));
  grpc::ClientContext context;
  EXPECT_EQ(stub->Quiesce(&context, request, &reply).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Health(node.rpc_socket(), ""), kServing);
}

}  // namespace
}  // namespace ashlar::daemon
