// SPDX-License-Identifier: Apache-2.0
// gRPC ends calls with RESOURCE_EXHAUSTED when its memory runs short, whatever the daemon has already started.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "ashlar/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using std::chrono::milliseconds;

// A proxy in front of a daemon that resets the streams of calls that use the engine's memory.
class Resetting final : public v1::Cache::Service {
 public:
  explicit Resetting(const std::string& daemon)
      : daemon_(v1::Cache::NewStub(grpc::CreateChannel("unix:" + daemon, grpc::InsecureChannelCredentials()))) {}

  grpc::Status OpenModel(grpc::ServerContext*, const v1::OpenModelRequest* request,
                         v1::OpenModelReply* reply) override {
    return Forward(&v1::Cache::Stub::OpenModel, *request, reply);
  }
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request, v1::ReserveReply* reply) override {
    return Forward(&v1::Cache::Stub::Reserve, *request, reply);
  }
  grpc::Status DeclarePages(grpc::ServerContext*, const v1::DeclarePagesRequest* request,
                            v1::DeclarePagesReply* reply) override {
    return Forward(&v1::Cache::Stub::DeclarePages, *request, reply);
  }
  grpc::Status Quiesce(grpc::ServerContext*, const v1::QuiesceRequest* request, v1::QuiesceReply* reply) override {
    return Forward(&v1::Cache::Stub::Quiesce, *request, reply);
  }
  grpc::Status Publish(grpc::ServerContext*, const v1::PublishRequest*, v1::PublishReply*) override { return Reset(); }
  grpc::Status Advance(grpc::ServerContext*, const v1::AdvanceRequest*, v1::CompositionReply*) override {
    return Reset();
  }

 private:
  static grpc::Status Reset() {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "Received RST_STREAM with error code 11"};
  }
  template <typename Method, typename Request, typename Reply>
  grpc::Status Forward(Method method, const Request& request, Reply* reply) {
    grpc::ClientContext context;
    return ((*daemon_).*method)(&context, request, reply);
  }

  const std::unique_ptr<v1::Cache::Stub> daemon_;
};

class MemoryPressure : public testing::Test {
 protected:
  static constexpr milliseconds kTimeout{1500};

  void SetUp() override {
    ClientOptions options = daemon_.client_options();
    resetting_ = std::make_unique<Resetting>(options.rpc_socket);
    options.rpc_socket = (std::filesystem::path(options.rpc_socket).parent_path() / "resetting.sock")
                             .string();  // removed with the folder
    options.timeout = kTimeout;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + options.rpc_socket, grpc::InsecureServerCredentials());
    builder.RegisterService(resetting_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    engine_ = std::make_unique<TestEngine>(options);
  }

  DaemonProcess daemon_;
  std::unique_ptr<Resetting> resetting_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<TestEngine> engine_;
};

// The daemon may be copying: the engine owns the sources again at the deadline, which the daemon keeps, not before.
TEST_F(MemoryPressure, AResetPublishKeepsItsSourcesUntilTheDeadline) {
  const Tokens run = MakePrompt(1, 1, 100)[0];
  // The client's time limit is short for the following steps; a busy machine may exceed it.
  Reservation reservation = engine_->Reserve(ObjectKind::kSegment, run);
  for (int i = 0; i < 20 && !reservation.granted(); ++i) reservation = engine_->Reserve(ObjectKind::kSegment, run);
  ASSERT_TRUE(reservation.granted());
  const PublishParts parts = engine_->Compute(ObjectKind::kSegment, run);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(engine_->model().Publish(reservation, parts), PublishOutcome::kUnavailable);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kTimeout);
}

// kBusy would promise that no state has changed.
TEST_F(MemoryPressure, AResetCompositionIsUnresolved) {
  LayerAdvance advance;
  advance.region = engine_->region();
  advance.state.data = engine_->region().data();
  Composition composition = engine_->model().Advance(nullptr, advance);
  EXPECT_EQ(composition.reason(), MissReason::kDaemonUnavailable);
  EXPECT_TRUE(composition.WaitQuiesced(kPatience));
}

}  // namespace
}  // namespace ashlar::integration
