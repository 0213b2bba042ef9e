// SPDX-License-Identifier: Apache-2.0
// Operators' calls over the admin socket of a daemon in this process.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<int32_t> Tokens(int count, int first = 42) {
  return Ascending(count, first);
}

// gRPC would share connections between tests.
std::unique_ptr<v1::Admin::Stub> Connect(const TestNode& node) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::Admin::NewStub(grpc::CreateCustomChannel(absl::StrCat("unix:", node.admin_socket()),
                                                      grpc::InsecureChannelCredentials(), arguments));
}

class AdminTest : public ::testing::Test {
 protected:
  grpc::Status Explain(const v1::Texts& request, v1::ExplainReply* reply) {
    grpc::ClientContext context;
    return admin_->Explain(&context, request, reply);
  }
  // For the engine's tenant and one model.
  v1::Texts Ask(const std::string& ns, ObjectKind kind, const std::vector<int32_t>& tokens) {
    v1::Texts request;
    request.set_tenant("default");
    request.set_ns(ns);
    v1::ObjectName* text = request.add_texts();
    text->set_kind(static_cast<uint32_t>(kind));
    text->set_tokens(PackTokens(tokens));
    return request;
  }
  v1::ExplainedText ExplainOne(const v1::Texts& request) {
    v1::ExplainReply reply;
    const grpc::Status status = Explain(request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.texts_size() == 1 ? reply.texts(0) : v1::ExplainedText();
  }
  std::string Ns(int model = 0) {
    grpc::ClientContext context;
    v1::ModelsReply reply;
    EXPECT_TRUE(admin_->Models(&context, v1::ModelsRequest(), &reply).ok());
    return reply.tenants(0).models(model).ns();
  }
  static MissReason Reason(const v1::ExplainedText& text) { return static_cast<MissReason>(text.miss_reason()); }

  TestNode node_;
  TestEngine engine_{node_};
  std::unique_ptr<v1::Admin::Stub> admin_ = Connect(node_);
};

TEST_F(AdminTest, ExplainsHitsAndMisses) {
  const std::string ns = Ns();
  const auto ask = Ask(ns, ObjectKind::kCheckpoint, Tokens(24));
  EXPECT_EQ(Reason(ExplainOne(ask)), MissReason::kNeverSeen);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  ASSERT_TRUE(engine_.Match(Tokens(24), {24}).ok());
  const v1::ExplainedText here = ExplainOne(ask);
  EXPECT_EQ(Reason(here), MissReason::kNone);
  EXPECT_EQ(here.ns(), ns);
  EXPECT_EQ(here.key().size(), 32u);
  EXPECT_EQ(here.tokens(), 24u);
  EXPECT_EQ(static_cast<TierKind>(here.present().tier()), TierKind::kDram);
  EXPECT_EQ(here.present().uses(), 1u);
  EXPECT_EQ(here.present().references(), 1u);
  EXPECT_GT(here.present().bytes(), 0u);
  EXPECT_EQ(Reason(ExplainOne(Ask(ns, ObjectKind::kSegment, Tokens(2)))), MissReason::kTooShort);
  EXPECT_EQ(ExplainOne(Ask(ns.substr(0, 2), ObjectKind::kCheckpoint, Tokens(24))).ns(), ns) << "a prefix will do";
}

TEST_F(AdminTest, ADrainRefusesEnginesUntilItEnds) {
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  const auto reason = [&] {
    return static_cast<MissReason>(engine_.Match(Tokens(24), {24})->segments(0).miss_reason());
  };
  const auto reserved = [&](int first) {
    return static_cast<ReserveOutcome>(engine_.Reserve(ObjectKind::kCheckpoint, Tokens(24, first)).outcome());
  };
  v1::DrainReply reply;
  for (int twice = 0; twice < 2; ++twice) {
    grpc::ClientContext context;
    ASSERT_TRUE(admin_->Drain(&context, v1::DrainRequest(), &reply).ok());
    EXPECT_TRUE(reply.draining());
    EXPECT_TRUE(reply.done()) << "there is no disk, and nothing is held";
    EXPECT_EQ(reply.memory_only_objects(), 1u);
    EXPECT_GT(reply.memory_only_bytes(), 0u);
    EXPECT_EQ(reply.grace_seconds(), 10);
    EXPECT_EQ(Health(node_.rpc_socket(), ""), kNotServing);
    EXPECT_EQ(Health(node_.rpc_socket(), "ashlar.v1.Cache"), kNotServing);
    EXPECT_EQ(StatusOf(RawSession(node_).Hello()).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(reason(), MissReason::kDaemonUnavailable);
    EXPECT_EQ(reserved(7), ReserveOutcome::kUnavailable);
  }
  grpc::ClientContext context;
  ASSERT_TRUE(admin_->Undrain(&context, v1::UndrainRequest(), &reply).ok());
  EXPECT_FALSE(reply.draining());
  EXPECT_EQ(Health(node_.rpc_socket(), "ashlar.v1.Cache"), kServing);
  EXPECT_TRUE(StatusOf(RawSession(node_).Hello()).ok());
  EXPECT_EQ(reason(), MissReason::kNone);
  EXPECT_EQ(reserved(7), ReserveOutcome::kGranted);
}

TEST_F(AdminTest, ExplainsAbandonedReservation) {
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kCheckpoint, Tokens(24));
  auto abandon = engine_.Make<v1::AbandonRequest>();
  abandon.add_reservations(reserved.reservation());
  v1::AbandonReply reply;
  ASSERT_TRUE(engine_.Call(abandon, &reply).ok());
  const v1::ExplainedText gone = ExplainOne(Ask(Ns(), ObjectKind::kCheckpoint, Tokens(24)));
  EXPECT_EQ(Reason(gone), MissReason::kAbandoned);
  EXPECT_EQ(static_cast<MissReason>(gone.gone().reason()), MissReason::kAbandoned);
  EXPECT_EQ(gone.gone().tier(), 0u);
  EXPECT_GT(gone.gone().bytes(), 0u);
  EXPECT_LT(gone.gone().seconds_ago(), 60);
}

TEST_F(AdminTest, NamesTheFieldInWhichNamespacesDiffer) {
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  const std::string published = Ns();
  Layout other = SmallLayout();
  std::get<AttentionLayer>(other.layers[1]).rope.scale = 0.5;
  TestEngine second(node_, other);
  ASSERT_NE(Ns(), published);
  const auto match = second.Match(Tokens(24), {24});
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(static_cast<MissReason>(match->segments(0).miss_reason()), MissReason::kNamespaceDiffers);

  const v1::ExplainedText text = ExplainOne(Ask(Ns(), ObjectKind::kCheckpoint, Tokens(24)));
  EXPECT_EQ(Reason(text), MissReason::kNamespaceDiffers);
  EXPECT_EQ(text.other_namespace().ns(), published);
  EXPECT_EQ(text.other_namespace().field(), "layout.layers[1].rope.scale");
  EXPECT_EQ(text.other_namespace().requested_value(), "0.5");
  EXPECT_EQ(text.other_namespace().other_value(), "1");

  // A model that was never opened, declared in full.
  Identity retrained = SmallIdentity();
  retrained.weights_digest += "-2";
  v1::Texts request = Ask("", ObjectKind::kCheckpoint, Tokens(24));
  request.set_identity(EncodeIdentity(retrained));
  request.set_layout(EncodeLayout(SmallLayout()));
  EXPECT_EQ(ExplainOne(request).other_namespace().field(), "identity.weights_digest");
}

TEST_F(AdminTest, ListsLatestMissesPerTenant) {
  ASSERT_TRUE(engine_.Match(Tokens(24), {24}).ok());
  ASSERT_TRUE(engine_.Match(Tokens(30, 1000), {30}).ok());
  grpc::ClientContext context;
  v1::LastMissesRequest request;
  request.set_count(1);
  v1::LastMissesReply reply;
  ASSERT_TRUE(admin_->LastMisses(&context, request, &reply).ok());
  ASSERT_EQ(reply.tenants_size(), 1);
  EXPECT_EQ(reply.tenants(0).tenant(), "default");
  ASSERT_EQ(reply.tenants(0).misses_size(), 1);
  const v1::MissedText& miss = reply.tenants(0).misses(0);
  EXPECT_EQ(miss.text().tokens(), 30u);
  EXPECT_EQ(miss.text().ns(), Ns());
  EXPECT_EQ(Reason(miss.text()), MissReason::kNeverSeen);
  EXPECT_LT(miss.seconds_ago(), 60);
}

TEST_F(AdminTest, ReportsStatus) {
  ASSERT_TRUE(engine_.Match(Tokens(24), {24}).ok());
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  ASSERT_TRUE(engine_.Match(Tokens(24), {24}).ok());
  grpc::ClientContext first, second, third;
  v1::StatsReply stats;
  ASSERT_TRUE(admin_->Stats(&first, v1::StatsRequest(), &stats).ok());
  EXPECT_EQ(stats.objects(), 1u);
  EXPECT_EQ(stats.leases(), 1u);
  EXPECT_EQ(stats.sessions(), 1u);
  ASSERT_EQ(stats.tenants_size(), 1);
  const v1::TenantStats& tenant = stats.tenants(0);
  ASSERT_EQ(tenant.hits_size(), 1);
  EXPECT_EQ(static_cast<TierKind>(tenant.hits(0).of()), TierKind::kDram);
  EXPECT_EQ(tenant.hits(0).tokens(), 24u);
  ASSERT_EQ(tenant.misses_size(), 1);
  EXPECT_EQ(static_cast<MissReason>(tenant.misses(0).of()), MissReason::kNeverSeen);
  ASSERT_GE(tenant.tiers_size(), 1);
  EXPECT_EQ(tenant.tiers(0).capacity_bytes(), 16u << 20);
  EXPECT_GT(tenant.tiers(0).used_bytes(), 0u);

  v1::SessionsReply sessions;
  ASSERT_TRUE(admin_->Sessions(&second, v1::SessionsRequest(), &sessions).ok());
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).pid(), getpid());
  EXPECT_EQ(sessions.sessions(0).models(), 1u);
  EXPECT_EQ(sessions.sessions(0).region_bytes(), TestEngine::kRegionBytes);
  EXPECT_FALSE(sessions.sessions(0).draining());

  v1::GetConfigReply config;
  ASSERT_TRUE(admin_->GetConfig(&third, v1::GetConfigRequest(), &config).ok());
  EXPECT_THAT(config.yaml(), HasSubstr("capacity_bytes: 16777216"));
}

TEST_F(AdminTest, RefusesByName) {
  const std::string ns = Ns();
  const auto refused = [&](const v1::Texts& request, grpc::StatusCode code, const std::string& message) {
    v1::ExplainReply reply;
    const grpc::Status status = Explain(request, &reply);
    EXPECT_EQ(status.error_code(), code) << message;
    EXPECT_THAT(status.error_message(), StartsWith(message));
  };
  constexpr auto kBad = grpc::StatusCode::INVALID_ARGUMENT, kNone = grpc::StatusCode::NOT_FOUND;
  const auto good = Ask(ns, ObjectKind::kSegment, Tokens(24));
  auto request = good;
  request.clear_tenant();
  refused(request, kBad, "tenant: required");
  request.set_tenant("nobody");
  refused(request, kNone, "tenant: \"nobody\"");
  refused(Ask("x", ObjectKind::kSegment, Tokens(24)), kBad, "ns: wrong length; expected 2 to 32 bytes");
  refused(Ask(std::string(33, 'x'), ObjectKind::kSegment, Tokens(24)), kBad,
          "ns: wrong length; expected 2 to 32 bytes");
  refused(Ask(ns.substr(0, 2) + "zzzz", ObjectKind::kSegment, Tokens(24)), kNone, "ns: no model begins with ");
  refused(Ask("", ObjectKind::kSegment, Tokens(24)), kBad, "identity");
  request = good;
  request.set_layout("x");
  refused(request, kBad, "ns: given together with an identity or a layout; expected one or the other");
  refused(Ask(ns, ObjectKind::kSpan, Tokens(24)), kBad, "texts[0].kind: ");
  refused(Ask(ns, ObjectKind::kSegment, {}), kBad, "texts[0].tokens: empty");
  request = good;
  request.mutable_texts(0)->set_tokens("abc");
  refused(request, kBad, "texts[0].tokens: length is not a multiple of 4 bytes (int32)");
}

TEST_F(AdminTest, TheSocketIsForRootAndTheDaemonsOwnUser) {
  struct stat socket;
  ASSERT_EQ(stat(node_.admin_socket().c_str(), &socket), 0);
  EXPECT_EQ(socket.st_mode & 0777, 0600u);
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  // Even if the mode would admit the user.
  ASSERT_EQ(chmod(node_.admin_socket().c_str(), 0666), 0);
  AsUser(65531, [&] {
    grpc::ClientContext context;
    v1::StatsReply reply;
    EXPECT_EQ(Connect(node_)->Stats(&context, v1::StatsRequest(), &reply).error_code(), grpc::StatusCode::UNAVAILABLE);
  });
}

TEST(Admin, StopsWhileCallsArrive) {
  auto node = std::make_unique<TestNode>();
  const auto admin = Connect(*node);
  std::thread asking([&] {
    while (true) {
      grpc::ClientContext context;
      v1::StatsReply reply;
      if (!admin->Stats(&context, v1::StatsRequest(), &reply).ok()) return;
    }
  });
  node->Stop();
  asking.join();
  struct stat socket;
  EXPECT_NE(stat(node->admin_socket().c_str(), &socket), 0);
}

TEST(Admin, RepliesContainNoDataOfOtherTenants) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  TestNode node(
      "tenants:\n"
      "  - {name: alpha, uids: [0], dram_bytes: 8MiB}\n"
      "  - {name: beta, uids: [65531], dram_bytes: 8MiB}\n");
  TestEngine alpha(node);
  ASSERT_EQ(alpha.PublishRun(ObjectKind::kCheckpoint, Tokens(24)), PublishOutcome::kPublished);
  const auto admin = Connect(node);
  grpc::ClientContext first, second;
  v1::Texts request;
  request.set_tenant("beta");
  request.set_identity(EncodeIdentity(SmallIdentity()));
  request.set_layout(EncodeLayout(SmallLayout()));
  v1::ObjectName* text = request.add_texts();
  text->set_kind(static_cast<uint32_t>(ObjectKind::kCheckpoint));
  text->set_tokens(PackTokens(Tokens(24)));
  v1::ExplainReply reply;
  ASSERT_TRUE(admin->Explain(&first, request, &reply).ok());
  EXPECT_EQ(static_cast<MissReason>(reply.texts(0).miss_reason()), MissReason::kNeverSeen);
  EXPECT_FALSE(reply.texts(0).has_other_namespace());
  v1::ModelsReply models;
  v1::ModelsRequest of_beta;
  of_beta.set_tenant("beta");
  ASSERT_TRUE(admin->Models(&second, of_beta, &models).ok());
  EXPECT_EQ(models.tenants(0).models_size(), 0);
}

}  // namespace
}  // namespace ashlar::daemon
