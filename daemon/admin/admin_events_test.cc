// SPDX-License-Identifier: Apache-2.0
// Events over the admin socket of a daemon in this process.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "ashlar/v1/events.grpc.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

class AdminEventsTest : public ::testing::Test {
 protected:
  std::shared_ptr<grpc::Channel> Dial() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("unix:", node_.admin_socket()), grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  struct Follower {
    grpc::ClientContext context;
    std::unique_ptr<v1::EventStream::Stub> stub;
    std::unique_ptr<grpc::ClientReader<v1::EventBatch>> reader;
    std::vector<v1::CacheEvent> Read(size_t count) {
      std::vector<v1::CacheEvent> events;
      v1::EventBatch batch;
      while (events.size() < count && reader->Read(&batch)) {
        events.insert(events.end(), batch.events().begin(), batch.events().end());
      }
      return events;
    }
  };
  std::unique_ptr<Follower> Follow(const v1::EventsRequest& request) const {
    auto follower = std::make_unique<Follower>();
    follower->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    follower->stub = v1::EventStream::NewStub(Dial());
    follower->reader = follower->stub->Subscribe(&follower->context, request);
    v1::EventBatch first;  // every later event is received
    follower->reader->Read(&first);
    return follower;
  }

  TestNode node_;
  TestEngine engine_{node_};
};

TEST_F(AdminEventsTest, SendsStoredAndRemovedEvents) {
  const auto follower = Follow({});
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, Ascending(24, 42)), PublishOutcome::kPublished);
  std::vector<v1::CacheEvent> events = follower->Read(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind(), v1::CacheEvent::STORED);
  EXPECT_EQ(events[0].tenant(), "default");
  EXPECT_EQ(events[0].key().size(), 32u);
  EXPECT_EQ(events[0].tokens(), 24u);
  EXPECT_EQ(static_cast<ObjectKind>(events[0].object()), ObjectKind::kCheckpoint);
  EXPECT_EQ(static_cast<TierKind>(events[0].tier()), TierKind::kDram);

  v1::Texts text;
  text.set_tenant("default");
  text.set_ns(events[0].namespace_());
  v1::ObjectName* name = text.add_texts();
  name->set_kind(static_cast<uint32_t>(ObjectKind::kCheckpoint));
  name->set_tokens(PackTokens(Ascending(24, 42)));
  grpc::ClientContext context;
  v1::ObjectsReply reply;
  ASSERT_TRUE(v1::Admin::NewStub(Dial())->Evict(&context, text, &reply).ok());
  events = follower->Read(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind(), v1::CacheEvent::REMOVED);
  EXPECT_EQ(events[0].sequence(), 2u);
}

TEST_F(AdminEventsTest, WrongRequestsNameTheField) {
  v1::EventsRequest request;
  request.set_tenant("nobody");
  EXPECT_EQ(Follow(request)->reader->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  request.clear_tenant();
  request.set_namespace_("short");
  const grpc::Status status = Follow(request)->reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "namespace: wrong length; expected 32 bytes");
}

TEST_F(AdminEventsTest, SubscribersAreBoundedAndLeaveCapacityForOperators) {
  std::vector<std::unique_ptr<Follower>> followers;
  for (int i = 0; i < 8; ++i) followers.push_back(Follow({}));
  EXPECT_EQ(Follow({})->reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::StatsReply stats;
  EXPECT_TRUE(v1::Admin::NewStub(Dial())->Stats(&context, v1::StatsRequest(), &stats).ok());
  for (const auto& follower : followers) follower->context.TryCancel();
  followers.clear();
}

}  // namespace
}  // namespace ashlar::daemon
