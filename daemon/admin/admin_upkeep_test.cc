// SPDX-License-Identifier: Apache-2.0
// Operators' calls on many objects, and on the configuration, over the admin socket of a daemon in this process.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/tokens.h"
#include "storage/testing/temporary_folder.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<int32_t> RunOf(int first) {
  return Ascending(24, first);
}

class AdminUpkeepTest : public ::testing::Test {
 protected:
  explicit AdminUpkeepTest(const std::string& more = "") : node_(more), engine_(node_) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    admin_ = v1::Admin::NewStub(grpc::CreateCustomChannel(absl::StrCat("unix:", node_.admin_socket()),
                                                          grpc::InsecureChannelCredentials(), arguments));
  }

  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    return (admin_.get()->*method)(&context, request, reply);
  }
  v1::ListReply List(const v1::ListRequest& request = {}) {
    v1::ListReply reply;
    const grpc::Status status = Call(&v1::Admin::Stub::List, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  std::string Refusal(const v1::ListRequest& request) {
    v1::ListReply reply;
    return Call(&v1::Admin::Stub::List, request, &reply).error_message();
  }
  v1::EraseReply Erase(const std::string& tenant, const std::string& ns = "", bool dry_run = false) {
    v1::EraseRequest request;
    request.set_tenant(tenant);
    request.set_ns(ns);
    request.set_dry_run(dry_run);
    v1::EraseReply reply;
    const grpc::Status status = Call(&v1::Admin::Stub::Erase, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  void Publish(int runs) {
    for (int i = 0; i < runs; ++i) {
      ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, RunOf(1000 * i)), PublishOutcome::kPublished);
    }
  }
  MissReason Reason(int run) {
    return static_cast<MissReason>(engine_.Match(RunOf(1000 * run), {24})->segments(0).miss_reason());
  }

  TestNode node_;
  TestEngine engine_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

TEST_F(AdminUpkeepTest, ListsObjectsInPages) {
  Publish(5);
  const v1::ListReply all = List();
  ASSERT_EQ(all.objects_size(), 5);
  EXPECT_FALSE(all.more());
  const v1::ListedObject& first = all.objects(0);
  EXPECT_EQ(first.tenant(), "default");
  EXPECT_EQ(first.key().size(), 32u);
  EXPECT_EQ(first.tokens(), 24u);
  EXPECT_GT(first.bytes(), 0u);
  EXPECT_EQ(static_cast<ObjectKind>(first.kind()), ObjectKind::kCheckpoint);
  EXPECT_EQ(first.tiers_size(), 1);
  std::set<std::string> keys;
  v1::ListRequest request;
  request.set_most(2);
  int pages = 0;
  for (bool more = true; more; ++pages) {
    const v1::ListReply page = List(request);
    EXPECT_LE(page.objects_size(), 2);
    for (const v1::ListedObject& object : page.objects()) EXPECT_TRUE(keys.insert(object.key()).second);
    request.set_after(page.next());
    more = page.more();
  }
  EXPECT_EQ(keys.size(), 5u);
  EXPECT_EQ(pages, 3);
  request = {};
  request.set_ns(first.ns());
  request.set_kind(static_cast<uint32_t>(ObjectKind::kCheckpoint));
  request.set_tier(static_cast<uint32_t>(TierKind::kDram));
  EXPECT_EQ(List(request).objects_size(), 5);
  request.set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
  EXPECT_EQ(List(request).objects_size(), 0);
}

TEST_F(AdminUpkeepTest, NamesTheFieldOfABadList) {
  v1::ListRequest request;
  request.set_tenant("nobody");
  EXPECT_THAT(Refusal(request), HasSubstr("tenant: \"nobody\""));
  request = {};
  request.set_ns("x");
  EXPECT_THAT(Refusal(request), HasSubstr("ns: wrong length; expected 2 to 32 bytes"));
  request.set_ns("xyz");
  EXPECT_THAT(Refusal(request), HasSubstr("ns: no model begins with"));
  request = {};
  request.set_kind(9);
  EXPECT_THAT(Refusal(request), HasSubstr("kind: "));
  request = {};
  request.set_tier(4);
  EXPECT_THAT(Refusal(request), HasSubstr("tier: "));
  request = {};
  request.set_most(10'001);
  EXPECT_THAT(Refusal(request), HasSubstr("most: "));
}

TEST_F(AdminUpkeepTest, ErasesATenantAfterReportingTheSize) {
  Publish(3);
  const std::string ns = List().objects(0).ns();
  ASSERT_EQ(Reason(1), MissReason::kNone);  // leased
  const v1::EraseReply dry = Erase("default", "", true);
  EXPECT_EQ(dry.objects(), 3u);
  EXPECT_EQ(dry.leased_objects(), 1u);
  ASSERT_EQ(dry.tiers_size(), 1);
  EXPECT_EQ(dry.tiers(0).bytes(), dry.bytes());
  EXPECT_FALSE(dry.done());
  EXPECT_EQ(List().objects_size(), 3) << "nothing was done";
  const v1::EraseReply done = Erase("", ns);
  EXPECT_EQ(done.objects(), 3u);
  EXPECT_EQ(done.bytes(), dry.bytes());
  EXPECT_TRUE(done.done());
  EXPECT_EQ(List().objects_size(), 0);
  for (const int run : {0, 1, 2}) EXPECT_EQ(Reason(run), MissReason::kNeverSeen);
  EXPECT_EQ(Erase("default").objects(), 0u);
  Publish(1);
  EXPECT_EQ(Reason(0), MissReason::kNone);
}

struct SsdFolder {
  storage::TemporaryFolder folder;
};

// The folder is the first base: it outlives the node.
class AdminUpkeepDiskTest : private SsdFolder, public AdminUpkeepTest {
 protected:
  AdminUpkeepDiskTest()
      : AdminUpkeepTest(absl::StrCat("ssd: {folder: ", folder.path(), "/ssd, capacity_bytes: 16MiB}\n")) {}
  v1::EraseReply Begin() {
    v1::EraseRequest request;
    request.set_tenant("default");
    request.set_wait_seconds(1e-9);  // the disk takes longer
    v1::EraseReply reply;
    EXPECT_TRUE(Call(&v1::Admin::Stub::Erase, request, &reply).ok());
    EXPECT_FALSE(reply.done());
    return reply;
  }
};

// An erasure whose command was abandoned does not cover objects published since, so no other command may continue it.
TEST_F(AdminUpkeepDiskTest, EachCommandErasesOnlyObjectsFromBeforeIt) {
  Publish(1);
  const v1::EraseReply begun = Begin();
  EXPECT_EQ(begun.objects(), 1u);
  Publish(2);
  const v1::EraseReply done = Erase("default");
  EXPECT_TRUE(done.done());
  EXPECT_EQ(done.objects(), 2u);
  EXPECT_EQ(List().objects_size(), 0);
  Publish(1);
  v1::EraseRequest again;
  again.set_tenant("default");
  again.set_erasure(begun.erasure());
  v1::EraseReply reply;
  EXPECT_TRUE(Call(&v1::Admin::Stub::Erase, again, &reply).ok());
  EXPECT_TRUE(reply.done());
  EXPECT_EQ(reply.objects(), 1u) << "the calls of one command go on with its own";
  EXPECT_EQ(List().objects_size(), 1);
  EXPECT_EQ(Call(&v1::Admin::Stub::Erase, again, &reply).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdminUpkeepDiskTest, AbandonedCommandsDoNotBlockOthers) {
  for (int i = 0; i < 100; ++i) Begin();
  EXPECT_TRUE(Erase("default").done());
}

TEST_F(AdminUpkeepTest, NamesTheFieldOfABadErase) {
  v1::EraseRequest request;
  v1::EraseReply reply;
  EXPECT_THAT(Call(&v1::Admin::Stub::Erase, request, &reply).error_message(),
              HasSubstr("tenant: tenant or ns is required"));
  request.set_ns(std::string(32, 'x'));
  EXPECT_THAT(Call(&v1::Admin::Stub::Erase, request, &reply).error_message(), HasSubstr("tenant: required"));
  request.set_tenant("default");
  request.set_wait_seconds(-1);
  EXPECT_THAT(Call(&v1::Admin::Stub::Erase, request, &reply).error_message(), HasSubstr("wait_seconds: "));
}

TEST_F(AdminUpkeepTest, VerifiesAllCopiesAndReportsProgress) {
  Publish(4);
  v1::VerifyReply reply;
  ASSERT_TRUE(Call(&v1::Admin::Stub::GetVerify, v1::GetVerifyRequest(), &reply).ok());
  EXPECT_EQ(reply.pass(), 0u);
  ASSERT_TRUE(Call(&v1::Admin::Stub::Verify, v1::VerifyRequest(), &reply).ok());
  EXPECT_TRUE(reply.running());
  EXPECT_TRUE(reply.requested());
  ASSERT_TRUE(Eventually(
      [&] { return Call(&v1::Admin::Stub::GetVerify, v1::GetVerifyRequest(), &reply).ok() && !reply.running(); }));
  EXPECT_EQ(reply.pass(), 1u);
  ASSERT_EQ(reply.tiers_size(), 1);
  EXPECT_EQ(reply.tiers(0).copies(), 4u);
  EXPECT_EQ(reply.tiers(0).damaged(), 0u);
  EXPECT_EQ(reply.damaged_size(), 0);
}

TEST_F(AdminUpkeepTest, ReloadFailsWithoutConfigurationFile) {
  v1::ReloadReply reply;
  EXPECT_THAT(Call(&v1::Admin::Stub::Reload, v1::ReloadRequest(), &reply).error_message(),
              HasSubstr("without a configuration file"));
}

class AuditedTest : public AdminUpkeepTest {
 protected:
  AuditedTest() : AdminUpkeepTest(absl::StrCat("log: {audit_file: ", kFile, "}\n")) {}
  ~AuditedTest() override { std::filesystem::remove(kFile); }
  static std::vector<nlohmann::json> Lines() {
    std::ifstream file(kFile);
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  static inline const std::string kFile = absl::StrCat("/tmp/ashlar_audit_test_", getpid());
};

TEST_F(AuditedTest, LogsOperatorActionAndOutcome) {
  Publish(2);
  Erase("default", "", true);
  v1::ListReply listed = List();
  v1::EraseReply reply;
  v1::EraseRequest bad;
  bad.set_tenant("nobody");
  EXPECT_FALSE(Call(&v1::Admin::Stub::Erase, bad, &reply).ok());
  v1::WarmReply warm;
  v1::Texts texts;
  texts.set_tenant("nobody");
  EXPECT_FALSE(Call(&v1::Admin::Stub::Warm, texts, &warm).ok());
  v1::DrainReply drain;
  ASSERT_TRUE(Call(&v1::Admin::Stub::Drain, v1::DrainRequest(), &drain).ok());
  ASSERT_TRUE(Call(&v1::Admin::Stub::Undrain, v1::UndrainRequest(), &drain).ok());
  const std::vector<nlohmann::json> lines = Lines();
  ASSERT_EQ(lines.size(), 5u) << "questions are no actions";
  EXPECT_EQ(lines[0]["action"], "Erase");
  EXPECT_THAT(lines[0]["request"].get<std::string>(), HasSubstr("tenant=default dry_run=true"));
  EXPECT_THAT(lines[0]["outcome"].get<std::string>(), HasSubstr("ok objects=2"));
  EXPECT_THAT(lines[1]["outcome"].get<std::string>(), HasSubstr("NOT_FOUND"));
  EXPECT_EQ(lines[2]["action"], "Warm");
  EXPECT_THAT(lines[2]["request"].get<std::string>(), HasSubstr("tenant=nobody"));
  EXPECT_EQ(lines[3]["action"], "Drain");
  EXPECT_EQ(lines[4]["action"], "Undrain");
  for (const nlohmann::json& line : lines) {
    EXPECT_EQ(line["uid"], geteuid());
    EXPECT_EQ(line["pid"], getpid()) << "the caller, as the kernel names it";
  }
}

}  // namespace
}  // namespace ashlar::daemon
