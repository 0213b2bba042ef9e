// SPDX-License-Identifier: Apache-2.0
// Tenants take turns: large requests of one tenant do not delay the others.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/runtime/worker_pool.h"
#include "daemon/session/model_registry.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/mutex.h"
#include "proto/limits.h"
#include "proto/tokens.h"
#include "storage/tier/memory_tier.h"
#include "storage/transfer/mover.h"

namespace ashlar::daemon {
namespace {

constexpr storage::TenantId kHeavy = 0, kLight = 1;

class EngineTurnsTest : public ::testing::Test {
 protected:
  static constexpr size_t kDepth = 256;

  void SetUp() override {
    tier_ = *storage::MemoryTier::Make({.capacity_bytes = 2 << 20, .arena_bytes = 1 << 20});
    for (const storage::TenantId tenant : {kHeavy, kLight}) ASSERT_TRUE(tier_->AddTenant(tenant, 1 << 20).ok());
    mover_.emplace(kernels::Reference(), threads_, workers_, *tier_);
    cache_.emplace(storage::CacheOptions{.random = [this] { return ++random_; }},
                   storage::Tiers{.memory = {tier_.get()}}, *mover_, workers_, clock_, &metrics_);
    table_.emplace(*cache_, loop_);
    router_.emplace(clock_, *cache_, Router::Options());
    service_.emplace(*cache_, metrics_, loop_, *table_, models_, *router_);
    loop_.Start();
    for (const storage::TenantId tenant : {kHeavy, kLight}) {
      sessions_.push_back(std::make_shared<Session>(Session::Description{
          .id = 1 + tenant, .secret = "fifteen bytes " + std::to_string(tenant) + "!", .tenant = tenant}));
      std::promise<void> opened;
      ASSERT_TRUE(table_->Open(sessions_.back(), [&] { opened.set_value(); }).ok());
      opened.get_future().wait();
      const auto model = std::make_shared<Model>(std::make_shared<const Layout>(SmallLayout()));
      ASSERT_EQ(*sessions_.back()->AddModel(model), kModel);
    }
  }
  void TearDown() override {
    workers_.Stop();
    loop_.Stop();
  }

  // Calls wait until Go.
  void Hold() {
    std::promise<void> held;
    ASSERT_TRUE(loop_.Post(kHeavy, [&held, go = go_.get_future().share()] {
      held.set_value();
      go.wait();
    }));
    held.get_future().wait();
  }
  void Go() { go_.set_value(); }

  // A Match of `prompts` prompts with as many segments. Answers are recorded by name, in order.
  void Match(storage::TenantId tenant, uint64_t prompts, uint64_t segments, char name) {
    calls_.push_back(std::make_unique<Call>());
    Call& call = *calls_.back();
    call.request.set_session(sessions_[tenant]->about().secret);
    call.request.set_model(kModel);
    for (uint64_t i = 0; i < prompts; ++i) {
      v1::Prompt* const prompt = call.request.add_prompts();
      prompt->set_tokens(PackTokens(Ascending(segments, 0)));
      prompt->mutable_segment_lengths()->Resize(static_cast<int>(segments), 1);
    }
    service_->Match(call.request, &call.reply, [this, name](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      MutexLock lock(mutex_);
      answered_ += name;
    });
  }
  // Pages of the heavy tenant's model, of 4 tokens.
  std::shared_ptr<Pages> DeclaredPages() {
    v1::DeclarePagesRequest request;
    request.set_page_tokens(4);
    request.set_pages(16);
    v1::PagedLayer* const layer = request.add_layers();
    layer->set_layer(1);
    layer->set_value_offset(64);
    layer->set_page_stride(4 * 112);
    layer->set_token_stride(112);
    layer->set_key_head_stride(32);
    layer->set_value_head_stride(24);
    auto pages = Pages::Declare(sessions_[kHeavy]->FindModel(kModel),
                                *Region::Register(MakeMemfd(1 << 20, F_SEAL_SHRINK), 1 << 20), request);
    EXPECT_TRUE(pages.ok()) << pages.status();
    return *std::move(pages);
  }
  std::string Answered(size_t count) {
    while (true) {
      MutexLock lock(mutex_);
      if (answered_.size() >= count) return answered_;
    }
  }

  static constexpr uint64_t kModel = 1;
  struct Call {
    v1::MatchRequest request;
    v1::MatchReply reply;
  };
  MonotonicClock clock_;
  uint64_t random_ = 0;
  Metrics metrics_{{"heavy", "light"}};
  EventLoop loop_{kDepth, clock_, 2};
  kernels::ThreadPool threads_{1};
  WorkerPool workers_{1, 8, loop_};
  std::unique_ptr<storage::MemoryTier> tier_;
  std::optional<storage::Mover> mover_;
  std::optional<storage::Cache> cache_;
  std::optional<SessionTable> table_;
  ModelRegistry models_;
  std::optional<Router> router_;
  std::optional<EngineService> service_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::promise<void> go_;
  std::vector<std::unique_ptr<Call>> calls_;
  Mutex mutex_;
  std::string answered_ ABSL_GUARDED_BY(mutex_);
};

// The largest Match takes tens of milliseconds, a quantum 200 µs: even the first one is divided.
TEST_F(EngineTurnsTest, LargeMatchYieldsToOtherTenantAfterOneSlice) {
  Hold();
  constexpr int kCalls = 5;
  for (int i = 0; i < kCalls; ++i) {
    Match(kHeavy, limits::kMaxLookupsPerMatch / limits::kMaxSegments, limits::kMaxSegments, 'h');
  }
  Match(kLight, 1, 1, 'l');
  Go();
  EXPECT_EQ(Answered(1 + kCalls).front(), 'l');
  EXPECT_EQ(calls_.front()->reply.prompts_size(), 4);
  EXPECT_EQ(calls_.front()->reply.prompts(3).segments_size(), static_cast<int>(limits::kMaxSegments));
}

TEST_F(EngineTurnsTest, AFullQueueAffectsOnlyItsTenant) {
  Hold();
  for (size_t i = 0; i < 3 * kDepth / 4; ++i) Match(kHeavy, 1, 1, 'h');
  v1::MatchReply reply;
  absl::Status refused;
  service_->Match(calls_.front()->request, &reply, [&](absl::Status status) { refused = std::move(status); });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  for (size_t i = 0; i < kDepth / 4; ++i) Match(kLight, 1, 1, 'l');
  Go();
  Answered(kDepth);
}

TEST_F(EngineTurnsTest, OnlyATenantAboveItsRateIsRefused) {
  storage::Rates& rates = service_->call_rates();
  rates.SetLimit(kHeavy, 1);
  Match(kHeavy, 1, 1, 'h');
  v1::MatchReply reply;
  absl::Status refused;
  service_->Match(calls_.front()->request, &reply, [&](absl::Status status) { refused = std::move(status); });
  EXPECT_EQ(refused, absl::ResourceExhaustedError("calls_per_second: the tenant exceeded its limit of 1"));
  v1::ReleaseRequest release;
  release.set_session(sessions_[kHeavy]->about().secret);
  v1::ReleaseReply released;
  std::promise<absl::Status> given_back;
  service_->Release(release, &released, [&](const absl::Status& status) { given_back.set_value(status); });
  EXPECT_TRUE(given_back.get_future().get().ok()) << "calls that give something back do not count";
  for (int i = 0; i < 20; ++i) Match(kLight, 1, 1, 'l');
  EXPECT_EQ(Answered(21).size(), 21u);
  EXPECT_EQ(rates.refused(kHeavy), 1u);
  EXPECT_EQ(rates.refused(kLight), 0u);
}

// It takes milliseconds, a quantum 200 µs.
TEST_F(EngineTurnsTest, ALargeAdmissionAndItsAnswerAreSliced) {
  Session& session = *sessions_[kHeavy];
  const auto pages = DeclaredPages();
  pages->Allocate(std::make_shared<storage::PagePool>(limits::kMaxAllocatedPages));
  const std::string lease(16, 'l');
  const auto turns_of = [&](const char* name, auto&& call) {
    loop_.TakeTurnTimes();
    std::promise<absl::Status> done;
    call([&](absl::Status status) { done.set_value(std::move(status)); });
    EXPECT_EQ(done.get_future().get(), absl::OkStatus()) << name;
    const EventLoop::TurnTimes::Times times = loop_.TakeTurnTimes().elapsed;
    RecordProperty(std::string(name) + "_longest_ns", std::to_string(times.longest));
    return std::accumulate(times.turns.begin(), times.turns.end(), uint64_t{0});
  };
  v1::AdmitRequest admit;
  admit.set_session(session.about().secret);
  admit.set_pages_id(*session.AddPages(kModel, pages));
  admit.set_lease(lease);
  admit.set_own_pages(limits::kMaxAllocatedPages / 2);
  v1::AdmitReply admitted, extended, attached;
  EXPECT_GT(turns_of("admit", [&](auto done) { service_->admissions().Admit(admit, &admitted, done); }), 2u);
  v1::ExtendAdmissionRequest extend;
  extend.set_session(session.about().secret);
  extend.set_lease(lease);
  extend.set_own_pages(limits::kMaxAllocatedPages);
  EXPECT_GT(turns_of("extend", [&](auto done) { service_->admissions().ExtendAdmission(extend, &extended, done); }),
            2u);
  v1::AttachAdmissionRequest attach;
  attach.set_session(session.about().secret);
  attach.set_lease(lease);
  EXPECT_GT(turns_of("attach", [&](auto done) { service_->admissions().AttachAdmission(attach, &attached, done); }),
            1u);
  EXPECT_EQ(admitted.admission().own_pages_size(), static_cast<int>(limits::kMaxAllocatedPages / 2));
  const auto& all = extended.admission().own_pages();
  EXPECT_TRUE(std::ranges::equal(all, attached.admission().own_pages()));
  EXPECT_EQ(std::set<int32_t>(all.begin(), all.end()).size(), limits::kMaxAllocatedPages);
  extend.set_own_pages(limits::kMaxAllocatedPages + 1);
  v1::AdmitReply refused;
  turns_of("refuse", [&](auto done) { service_->admissions().ExtendAdmission(extend, &refused, done); });
  EXPECT_EQ(refused.lacks().needed(), 1u);
  EXPECT_FALSE(refused.has_admission());
}

// Between two slices no other work of the tenant runs: its session ends after the lookup in progress.
TEST_F(EngineTurnsTest, ASessionEndsAfterItsQueuedCalls) {
  Hold();
  Match(kHeavy, 4, limits::kMaxSegments, 'h');
  table_->Close(sessions_[kHeavy], "test");
  Go();
  EXPECT_EQ(Answered(1), "h");
  EXPECT_TRUE(Eventually([&] { return table_->size() == 1; }));
}

}  // namespace
}  // namespace ashlar::daemon
