// SPDX-License-Identifier: Apache-2.0
// Calls while the metadata queue is full, and calls whose session ends before they do.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/rpc/rpc_server.h"
#include "daemon/runtime/worker_pool.h"
#include "daemon/session/model_registry.h"
#include "daemon/session/region.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "kernels/host/thread_pool.h"
#include "proto/limits.h"
#include "proto/tokens.h"
#include "storage/tier/memory_tier.h"
#include "storage/transfer/mover.h"

namespace ashlar::daemon {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Only the service, over a loop that a test can stop.
class BoundedQueueTest : public ::testing::Test {
 protected:
  static constexpr size_t kDepth = 2;

  void SetUp() override {
    tier_ = *storage::MemoryTier::Make({.capacity_bytes = 1 << 20, .arena_bytes = 1 << 20});
    ASSERT_TRUE(tier_->AddTenant(0, 1 << 20).ok());
    mover_.emplace(kernels::Reference(), threads_, workers_, *tier_);
    cache_.emplace(storage::CacheOptions{.random = [this] { return ++random_; }},
                   storage::Tiers{.memory = {tier_.get()}}, *mover_, workers_, clock_, &metrics_);
    table_.emplace(*cache_, loop_);
    router_.emplace(clock_, *cache_, Router::Options());
    service_.emplace(*cache_, metrics_, loop_, *table_, models_, *router_);
    loop_.Start();
    Session::Description about;
    about.secret = "sixteen bytes ok";
    about.uid = geteuid();
    about.models = std::make_shared<Budget>("a tenant", "bytes of models", 1 << 20);
    session_ = std::make_shared<Session>(about);
    std::promise<void> opened;
    ASSERT_TRUE(table_->Open(session_, [&] { opened.set_value(); }).ok());
    opened.get_future().wait();
    model_ = *session_->AddModel(std::make_shared<Model>(std::make_shared<const Layout>(SmallLayout())));
  }
  void TearDown() override {
    if (held_) hold_.set_value();
    workers_.Stop();
    loop_.Stop();
  }
  void FillQueue() {
    std::promise<void> held;
    ASSERT_TRUE(loop_.Post(0, [this, &held] {
      held.set_value();
      hold_.get_future().wait();
    }));
    held.get_future().wait();
    held_ = true;
    for (size_t i = 0; i < kDepth; ++i) ASSERT_TRUE(loop_.Post(0, [] {}));
  }

  MonotonicClock clock_;
  uint64_t random_ = 0;
  std::promise<void> hold_;
  bool held_ = false;
  Metrics metrics_{{"default"}};
  EventLoop loop_{kDepth, clock_};
  kernels::ThreadPool threads_{1};
  WorkerPool workers_{1, 8, loop_};
  std::unique_ptr<storage::MemoryTier> tier_;
  std::optional<storage::Mover> mover_;
  std::optional<storage::Cache> cache_;
  std::optional<SessionTable> table_;
  ModelRegistry models_;
  std::optional<Router> router_;
  std::optional<EngineService> service_;
  std::shared_ptr<Session> session_;
  uint64_t model_ = 0;
};

TEST_F(BoundedQueueTest, AReservationThatWaitsForAnArenaDelaysNoOtherCall) {
  std::promise<std::shared_ptr<storage::ComingArena>> asked;
  std::promise<void> set;
  loop_.PostCompletion(0, [&] {
    tier_->CreateOn([&](storage::TenantId, const std::shared_ptr<storage::ComingArena>& arena) {
      asked.set_value(arena);
      return true;
    });
    set.set_value();
  });
  set.get_future().wait();
  v1::ReserveRequest reserve;
  reserve.set_session(session_->about().secret);
  reserve.set_model(model_);
  for (const int32_t first : {0, 100}) {
    v1::ObjectName* const object = reserve.add_objects();
    object->set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
    object->set_tokens(PackTokens(Ascending(64, first)));
  }
  v1::ReserveReply reserved;
  std::promise<absl::Status> done;
  service_->Reserve(reserve, &reserved, [&](absl::Status status) { done.set_value(std::move(status)); });
  const std::shared_ptr<storage::ComingArena> arena = asked.get_future().get();
  v1::MatchRequest match;
  match.set_session(session_->about().secret);
  match.set_model(model_);
  v1::MatchReply matched;
  std::promise<absl::Status> answered;
  service_->Match(match, &matched, [&](absl::Status status) { answered.set_value(std::move(status)); });
  EXPECT_EQ(answered.get_future().get(), absl::OkStatus());
  std::future<absl::Status> ended = done.get_future();
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  arena->MakeAhead();
  loop_.PostCompletion(0, [&] { EXPECT_TRUE(tier_->Prepared(0, arena).ok()); });
  EXPECT_EQ(ended.get(), absl::OkStatus());
  ASSERT_EQ(reserved.results_size(), 2);
  for (const v1::ReserveResult& result : reserved.results()) {
    EXPECT_EQ(result.outcome(), static_cast<uint32_t>(ReserveOutcome::kGranted));
  }
}

TEST_F(BoundedQueueTest, AFullQueueRefusesAtOnceButAcceptsReleases) {
  FillQueue();
  v1::MatchRequest match;
  match.set_session(session_->about().secret);
  match.set_model(model_);
  v1::MatchReply matched;
  absl::Status answer;
  service_->Match(match, &matched, [&](absl::Status status) { answer = status; });
  EXPECT_EQ(answer.code(), absl::StatusCode::kResourceExhausted) << "answered on the caller's thread, without waiting";

  // These calls release something, so they wait for their turn.
  v1::ReleaseRequest release;
  release.set_session(session_->about().secret);
  v1::ReleaseReply released;
  std::promise<absl::Status> release_answer;
  service_->Release(release, &released, [&](absl::Status status) { release_answer.set_value(status); });
  v1::QuiesceRequest quiesce;
  quiesce.set_session(session_->about().secret);
  quiesce.set_daemon_epoch(table_->daemon_epoch());
  v1::QuiesceReply quiesced;
  std::promise<absl::Status> quiesce_answer;
  service_->Quiesce(quiesce, &quiesced, [&](absl::Status status) { quiesce_answer.set_value(status); });
  auto release_future = release_answer.get_future();
  EXPECT_EQ(release_future.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
  hold_.set_value();
  EXPECT_TRUE(release_future.get().ok());
  EXPECT_TRUE(quiesce_answer.get_future().get().ok());
  held_ = false;
}

// gRPC may return a status after the daemon has begun, so only a reply proves that nothing was started.
TEST_F(BoundedQueueTest, AFullQueueIsAnOutcomeOfCallsThatUseEngineMemory) {
  FillQueue();
  v1::PublishRequest publish;
  publish.set_session(session_->about().secret);
  for (int i = 0; i < 2; ++i) publish.add_objects()->set_provenance(static_cast<uint32_t>(Provenance::kExact));
  v1::PublishReply published;
  absl::Status answer = absl::UnknownError("none yet");
  service_->Publish(publish, &published, [&](absl::Status status) { answer = status; });
  EXPECT_TRUE(answer.ok()) << answer;
  EXPECT_THAT(published.outcomes(), Each(static_cast<uint32_t>(PublishOutcome::kBusy)));
  EXPECT_EQ(published.outcomes_size(), 2);

  constexpr size_t kBytes = 1 << 20;
  const std::shared_ptr<Region> memory = *Region::Register(MakeMemfd(kBytes, F_SEAL_SHRINK), kBytes);
  ASSERT_TRUE(memory->TakePages(0).ok());
  const uint64_t region = *session_->AddRegion(memory);
  Layout layout = SmallLayout();
  layout.layers.pop_back();  // without attention, and so without pages
  auto linear = std::make_shared<Model>(std::make_shared<const Layout>(std::move(layout)));
  linear->prefixes = *storage::MakePrefixModel(linear->ns, linear->shard, linear->shared_layout, 1, {});
  v1::CommitRequest commit;
  commit.set_session(session_->about().secret);
  commit.set_model(*session_->AddModel(linear));
  commit.set_tokens(PackTokens(Ascending(10, 1)));
  commit.set_prompt_tokens(10);
  commit.set_provenance(static_cast<uint32_t>(Provenance::kExact));
  commit.add_checkpoints()->set_depth(10);
  for (const PartForm form : {PartForm::kState, PartForm::kConvTail}) {
    v1::PartSource* part = commit.mutable_checkpoints(0)->add_parts();
    part->set_form(static_cast<uint32_t>(form));
    part->set_region(region);
  }
  v1::CommitReply committed;
  answer = absl::UnknownError("none yet");
  service_->Commit(commit, &committed, [&](absl::Status status) { answer = status; });
  EXPECT_TRUE(answer.ok()) << answer;
  EXPECT_THAT(committed.outcomes(), ElementsAre(static_cast<uint32_t>(CommitOutcome::kBusy)));

  v1::AdvanceRequest advance;
  advance.set_session(session_->about().secret);
  advance.set_model(model_);
  advance.mutable_state()->set_region(region);
  advance.mutable_state()->set_dtype(static_cast<uint32_t>(DType::kF32));
  advance.set_lease("sixteen bytes ok");
  advance.add_steps()->mutable_segment();
  v1::CompositionReply composed;
  answer = absl::UnknownError("none yet");
  service_->Advance(advance, &composed, [&](absl::Status status) { answer = status; });
  EXPECT_TRUE(answer.ok()) << answer;
  EXPECT_EQ(composed.miss_reason(), static_cast<uint32_t>(MissReason::kBusy));
  EXPECT_EQ(composed.segments_size(), 1);
}

TEST_F(BoundedQueueTest, AcceptsTheMaximumNumberOfSegments) {
  v1::MatchRequest match;
  match.set_session(session_->about().secret);
  match.set_model(model_);
  for (uint64_t i = 0; i < limits::kMaxLookupsPerMatch; i += limits::kMaxSegments) {
    match.add_prompts()->set_tokens(PackTokens(Ascending(limits::kMaxSegments, 0)));
    match.mutable_prompts()->rbegin()->mutable_segment_lengths()->Resize(limits::kMaxSegments, 1);
  }
  v1::MatchReply reply;
  std::promise<absl::Status> answer;
  service_->Match(match, &reply, [&](absl::Status status) { answer.set_value(status); });
  EXPECT_TRUE(answer.get_future().get().ok());
  EXPECT_EQ(reply.prompts_size(), match.prompts_size());
}

TEST_F(BoundedQueueTest, ASessionThatEndsMeanwhileIsUnauthenticated) {
  FillQueue();
  v1::ReleaseRequest release;
  release.set_session(session_->about().secret);
  v1::ReleaseReply released;
  std::promise<absl::Status> answer;
  // Posted after the close, although the session was found before it.
  const std::shared_ptr<Session> found = table_->Find(session_->about().secret);
  ASSERT_NE(found, nullptr);
  service_->Release(release, &released, [&](absl::Status status) { answer.set_value(status); });
  table_->Close(session_, "test");
  EXPECT_EQ(table_->Find(session_->about().secret), nullptr);
  absl::Status late;
  service_->Release(release, &released, [&](absl::Status status) { late = status; });
  EXPECT_EQ(late.code(), absl::StatusCode::kUnauthenticated);
  hold_.set_value();
  EXPECT_TRUE(answer.get_future().get().ok());
  EXPECT_TRUE(Eventually([&] { return table_->size() == 0; }));
  held_ = false;
}

// A load balancer that follows the health check sends no more requests, while accepted calls still finish.
TEST_F(BoundedQueueTest, StoppingDaemonReportsNotServing) {
  const std::string socket = absl::StrCat("/tmp/ashlard_drain_", getpid(), ".sock");
  RefusedConnections refused;
  auto server = RpcServer::Start(socket, {{{geteuid(), 0}}, 64}, *service_, metrics_, refused);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(Health(socket, "ashlar.v1.Cache"), kServing);
  FillQueue();
  const auto stub =
      v1::Cache::NewStub(grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
  auto call = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    v1::ReleaseRequest release;
    release.set_session(session_->about().secret);
    v1::ReleaseReply released;
    return stub->Release(&context, release, &released).ok();
  });
  ASSERT_TRUE(Eventually([&] { return loop_.depth() == kDepth + 1; }));
  std::thread stopping([&] { (*server)->Stop(20'000'000'000); });
  EXPECT_TRUE(Eventually([&] { return Health(socket, "ashlar.v1.Cache") == kNotServing; }));
  EXPECT_EQ(Health(socket, ""), kNotServing);
  EXPECT_EQ(call.wait_for(std::chrono::milliseconds(0)), std::future_status::timeout);
  hold_.set_value();
  held_ = false;
  EXPECT_TRUE(call.get());
  stopping.join();
}

// A dead engine's leases and reservations are free for others at once, however long unmapping its memory takes.
TEST_F(BoundedQueueTest, UnmappingDeadEngineMemoryBlocksNoCalls) {
  EventLoop mappings(kDepth, clock_);
  mappings.Start();
  std::promise<std::thread::id> unmapping;
  std::promise<void> busy;
  ASSERT_TRUE(mappings.Post(0, [&, may_go = busy.get_future().share()] {
    unmapping.set_value(std::this_thread::get_id());
    may_go.wait();
  }));
  auto region = Region::UnmapOn(mappings, 0, *Region::Register(MakeMemfd(4096, F_SEAL_SHRINK), 4096));
  std::promise<std::thread::id> gone;
  auto gone_on = gone.get_future();
  region->WhenGone([&gone] { gone.set_value(std::this_thread::get_id()); });
  ASSERT_TRUE(session_->AddRegion(std::move(region)).ok());
  std::promise<ReserveOutcome> reserved;
  ASSERT_TRUE(loop_.Post(0, [&] {
    reserved.set_value(
        cache_->Reserve(session_->about().id, *PlanObject(SmallLayout(), {}, {}, ObjectKind::kSegment, 24)).outcome);
  }));
  ASSERT_EQ(reserved.get_future().get(), ReserveOutcome::kGranted);

  table_->Close(session_, "test");
  EXPECT_TRUE(Eventually([&] { return table_->size() == 0; })) << "drained";
  std::promise<uint64_t> left;
  ASSERT_TRUE(loop_.Post(0, [&] { left.set_value(cache_->stats().reservations); }));
  EXPECT_EQ(left.get_future().get(), 0u);
  EXPECT_NE(gone_on.wait_for(std::chrono::milliseconds(0)), std::future_status::ready) << "still mapped";
  busy.set_value();
  EXPECT_EQ(gone_on.get(), unmapping.get_future().get());
}

// The metadata thread drops a transfer's hold on memory; it never unmaps.
TEST_F(BoundedQueueTest, TheMetadataThreadDoesNotUnmap) {
  EventLoop mappings(kDepth, clock_);
  mappings.Start();
  auto region = Region::UnmapOn(mappings, 0, *Region::Register(MakeMemfd(4096, F_SEAL_SHRINK), 4096));
  std::promise<std::thread::id> gone, metadata;
  region->WhenGone([&gone] { gone.set_value(std::this_thread::get_id()); });
  ASSERT_TRUE(loop_.Post(0, [&metadata, last = std::move(region)]() mutable {
    last = nullptr;
    metadata.set_value(std::this_thread::get_id());
  }));
  EXPECT_NE(gone.get_future().get(), metadata.get_future().get());
}

TEST(LandingLedger, RemembersABoundedNumberOfLandings) {
  LandingLedger ledger;
  EXPECT_TRUE(ledger.MayStart(0));
  ledger.Silence(5);
  EXPECT_FALSE(ledger.MayStart(5));
  EXPECT_TRUE(ledger.MayStart(4));
  for (uint64_t i = 0; i < 2 * LandingLedger::kRemembered; ++i) ledger.Silence(10 + 2 * i);
  EXPECT_FALSE(ledger.MayStart(5)) << "erased by raising the floor above it";
  EXPECT_FALSE(ledger.MayStart(10));
  EXPECT_FALSE(ledger.MayStart(10 + 2 * (2 * LandingLedger::kRemembered - 1)));
  EXPECT_TRUE(ledger.MayStart(10 + 2 * (2 * LandingLedger::kRemembered - 1) + 1));
}

}  // namespace
}  // namespace ashlar::daemon
