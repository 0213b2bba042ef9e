// The calls of ashlar.v1.Cache over gRPC, with raw stubs: what they do, and every way to get them wrong.
#include "daemon/engine_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "daemon/worker_pool.h"
#include "kernels/host/thread_pool.h"
#include "proto/limits.h"
#include "proto/tokens.h"
#include "storage/mover.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<int32_t> Tokens(int count, int first) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

v1::LandSegment At(uint32_t segment, uint64_t position) {
  v1::LandSegment out;
  out.set_segment(segment);
  out.set_first_position(position);
  return out;
}

template <typename Method, typename Request, typename Reply>
grpc::Status Call(TestEngine& engine, Method method, const Request& request, Reply* reply) {
  grpc::ClientContext context;
  return (engine.stub().*method)(&context, request, reply);
}

class EngineServiceTest : public ::testing::Test {
 protected:
  // Numbers every float of the engine's memory, so that each row and matrix is its own.
  void FillMemory() {
    auto* floats = reinterpret_cast<float*>(engine_.memory());
    for (size_t i = 0; i < TestEngine::kRegionBytes / sizeof(float); ++i)
      floats[i] = static_cast<float>(i % 9973) - 5000;
  }

  TestNode node_;
  TestEngine engine_{node_};
};

TEST_F(EngineServiceTest, OpenModelNamesTheNamespace) {
  auto request = engine_.Make<v1::OpenModelRequest>();
  request.set_identity(EncodeIdentity(SmallIdentity()));
  request.set_layout(EncodeLayout(SmallLayout()));
  v1::OpenModelReply reply;
  ASSERT_TRUE(Call(engine_, &v1::Cache::Stub::OpenModel, request, &reply).ok());
  const NamespaceId expected = MakeNamespace("default", SmallIdentity(), SmallLayout());
  EXPECT_EQ(reply.ns(), std::string(reinterpret_cast<const char*>(expected.bytes.data()), 32));
  EXPECT_EQ(reply.tenant(), "default");
  EXPECT_NE(reply.model(), engine_.model());
}

TEST_F(EngineServiceTest, MissThenPublishThenHit) {
  const std::vector<int32_t> prompt = Tokens(64, 1);
  auto match = engine_.Match(prompt, {16, 32, 6});
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->lease(), "");
  EXPECT_EQ(match->prefix_depth(), 0u);
  EXPECT_THAT(match->checkpoint_positions(), ElementsAre(16));
  ASSERT_EQ(match->segments_size(), 3);
  EXPECT_EQ(match->segments(0).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));
  EXPECT_EQ(match->segments(0).kind(), static_cast<uint32_t>(ObjectKind::kCheckpoint));
  EXPECT_EQ(match->segments(1).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));
  EXPECT_EQ(match->segments(1).kind(), static_cast<uint32_t>(ObjectKind::kSegment));
  EXPECT_EQ(match->segments(2).miss_reason(), static_cast<uint32_t>(MissReason::kTooShort));

  const std::span<const int32_t> all(prompt);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, all.subspan(0, 16)), PublishOutcome::kPublished);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, all.subspan(16, 32)), PublishOutcome::kPublished);
  match = engine_.Match(prompt, {16, 32, 6});
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->lease().size(), 16u);
  EXPECT_EQ(match->prefix_depth(), 16u);
  EXPECT_EQ(match->checkpoint_positions_size(), 0);
  EXPECT_EQ(match->segments(1).miss_reason(), 0u);
  EXPECT_EQ(match->segments(1).tier(), static_cast<uint32_t>(TierKind::kDram));
  EXPECT_GT(match->segments(1).bytes(), 0u);
  ASSERT_GE(match->segments(1).extents_size(), 1);
  EXPECT_GE(match->segments(1).extents(0).count(), 1u);

  // Another second publisher is told so.
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, all.subspan(16, 32)).outcome(),
            static_cast<uint32_t>(ReserveOutcome::kAlreadyPresent));
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, all.subspan(0, 6)).outcome(),
            static_cast<uint32_t>(ReserveOutcome::kTooShort));
}

TEST_F(EngineServiceTest, LandsWhatWasPublishedTurnedToItsPosition) {
  FillMemory();
  const Layout layout = SmallLayout();
  const auto& attention = std::get<AttentionLayer>(layout.layers[1]);
  const std::vector<int32_t> tokens = Tokens(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, tokens), PublishOutcome::kPublished);
  const std::vector<std::byte> published(engine_.memory(), engine_.memory() + TestEngine::kRegionBytes);

  // The same text behind a prefix that nobody has cached.
  std::vector<int32_t> prompt = Tokens(8, 1000);
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  const auto match = engine_.Match(prompt, {8, 24});
  ASSERT_TRUE(match.ok());
  constexpr uint64_t kPosition = 100;
  const auto verdict = engine_.Land(engine_.LandRequest(match->lease(), {At(1, kPosition)}));
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kNone));

  const auto original = [&](float* row) {
    return reinterpret_cast<const float*>(published.data() + (reinterpret_cast<std::byte*>(row) - engine_.memory()));
  };
  for (uint32_t t = layout.head; t < 24 - layout.tail; ++t) {
    for (uint32_t head = 0; head < attention.kv_heads; ++head) {
      const uint64_t p = kPosition + t;
      const float* key = engine_.Key(static_cast<int32_t>(p / 4), p % 4, head);
      const float* value = engine_.Value(static_cast<int32_t>(p / 4), p % 4, head);
      const float* old_key = original(engine_.Key(static_cast<int32_t>(t / 4), t % 4, head));
      const float* old_value = original(engine_.Value(static_cast<int32_t>(t / 4), t % 4, head));
      for (int i = 0; i < 2; ++i) {
        const double angle = kPosition * attention.rope.frequencies[i];
        const double x = old_key[i], y = old_key[i + 2];
        EXPECT_NEAR(key[i], x * std::cos(angle) - y * std::sin(angle), 1e-2);
        EXPECT_NEAR(key[i + 2], x * std::sin(angle) + y * std::cos(angle), 1e-2);
      }
      for (uint32_t i = 4; i < attention.key_dim; ++i) EXPECT_EQ(key[i], old_key[i]);
      for (uint32_t i = 0; i < attention.value_dim; ++i) EXPECT_EQ(value[i], old_value[i]);
    }
  }
  // Nothing but the interior was written.
  const uint64_t before = kPosition + layout.head - 1, behind = kPosition + 24 - layout.tail;
  EXPECT_EQ(*engine_.Key(before / 4, before % 4, 0), *original(engine_.Key(before / 4, before % 4, 0)));
  EXPECT_EQ(*engine_.Key(behind / 4, behind % 4, 0), *original(engine_.Key(behind / 4, behind % 4, 0)));
}

TEST_F(EngineServiceTest, QuiesceThatOvertakesItsLandingKeepsItFromWriting) {
  FillMemory();
  const std::vector<int32_t> tokens = Tokens(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const auto match = engine_.Match(tokens, {24});
  ASSERT_TRUE(match.ok());
  std::memset(engine_.memory(), 0, TestEngine::kTensors);
  const v1::LandRequest landing = engine_.LandRequest(match->lease(), {At(0, 0)});
  auto quiesce = engine_.Make<v1::QuiesceRequest>();
  quiesce.set_landing(landing.landing());
  v1::QuiesceReply reply;
  ASSERT_TRUE(Call(engine_, &v1::Cache::Stub::Quiesce, quiesce, &reply).ok());
  const auto verdict = engine_.Land(landing);
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kCancelled));
  EXPECT_EQ(*engine_.Value(0, 0, 0), 0.0f);
  const auto again = engine_.Land(engine_.LandRequest(match->lease(), {At(0, 0)}));
  ASSERT_TRUE(again.ok());
  EXPECT_THAT(*again, ElementsAre(MissReason::kNone));
  EXPECT_NE(*engine_.Value(0, 0, 0), 0.0f);
}

TEST_F(EngineServiceTest, ReleasedAndInventedLeasesAreMisses) {
  const std::vector<int32_t> tokens = Tokens(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const auto match = engine_.Match(tokens, {24});
  ASSERT_TRUE(match.ok());
  auto release = engine_.Make<v1::ReleaseRequest>();
  release.add_leases(match->lease());
  release.add_leases(match->lease());
  v1::ReleaseReply released;
  ASSERT_TRUE(Call(engine_, &v1::Cache::Stub::Release, release, &released).ok());
  for (const std::string& lease : {match->lease(), std::string(16, 'x')}) {
    const auto verdict = engine_.Land(engine_.LandRequest(lease, {At(0, 0), At(1, 40)}));
    ASSERT_TRUE(verdict.ok());
    EXPECT_THAT(*verdict, ElementsAre(MissReason::kLeaseLost, MissReason::kLeaseLost));
  }
}

TEST_F(EngineServiceTest, AnAttachedLeaseOutlivesItsFirstHolder) {
  const std::vector<int32_t> tokens = Tokens(24, 7);
  std::string lease;
  {
    TestEngine first(node_);
    ASSERT_EQ(first.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
    lease = first.Match(tokens, {24})->lease();
    auto attach = engine_.Make<v1::AttachLeaseRequest>();
    attach.set_lease(lease);
    v1::AttachLeaseReply reply;
    ASSERT_TRUE(Call(engine_, &v1::Cache::Stub::AttachLease, attach, &reply).ok());
    EXPECT_EQ(reply.match().lease(), lease);
    EXPECT_EQ(reply.match().prefix_depth(), 24u);
    ASSERT_EQ(reply.match().segments_size(), 1);
  }
  const auto verdict = engine_.Land(engine_.LandRequest(lease, {At(0, 0)}));
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kNone));
  auto unknown = engine_.Make<v1::AttachLeaseRequest>();
  unknown.set_lease(std::string(16, 'x'));
  v1::AttachLeaseReply reply;
  EXPECT_EQ(Call(engine_, &v1::Cache::Stub::AttachLease, unknown, &reply).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(EngineServiceTest, BadSourcesEndTheirReservationAndNothingElse) {
  const std::vector<int32_t> tokens = Tokens(24, 7);
  const struct {
    const char* name;
    std::function<void(v1::PublishObject&)> spoil;
  } kCases[] = {
      {"outside the region", [](auto& o) { o.mutable_parts(0)->set_offset(TestEngine::kRegionBytes - 4); }},
      {"far outside", [](auto& o) { o.mutable_parts(0)->set_offset(~uint64_t{0} - 3); }},
      {"not aligned", [](auto& o) { o.mutable_parts(0)->set_offset(TestEngine::kTensors + 2); }},
      {"unknown region", [](auto& o) { o.mutable_parts(1)->set_region(999); }},
      {"a part is missing", [](auto& o) { o.mutable_parts()->RemoveLast(); }},
      {"a part too many",
       [](auto& o) {
         *o.add_parts() = o.parts(0);
         o.mutable_parts(o.parts_size() - 1)->set_layer(7);
       }},
      {"unknown pages", [](auto& o) { o.set_pages_id(999); }},
      {"short page table", [](auto& o) { o.mutable_page_table()->Truncate(3); }},
      {"empty page table", [](auto& o) { o.clear_page_table(); }},
      {"page too high", [](auto& o) { o.set_page_table(2, TestEngine::kPages); }},
      {"negative page", [](auto& o) { o.set_page_table(2, -1); }},
      {"position behind the page table", [](auto& o) { o.set_first_position(1000); }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
    ASSERT_EQ(reserved.outcome(), static_cast<uint32_t>(ReserveOutcome::kGranted));
    v1::PublishObject object = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
    c.spoil(object);
    EXPECT_EQ(engine_.Publish(object), PublishOutcome::kBadSource);
    EXPECT_EQ(engine_.Publish(object), PublishOutcome::kUnknownReservation);
  }
  // A page that the interior does not touch need not be one.
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  v1::PublishObject object = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  object.set_page_table(0, -1);
  EXPECT_EQ(engine_.Publish(object), PublishOutcome::kPublished);
}

TEST_F(EngineServiceTest, AbandonMakesRoomForAnother) {
  const std::vector<int32_t> tokens = Tokens(24, 7);
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  auto abandon = engine_.Make<v1::AbandonRequest>();
  abandon.add_reservations(reserved.reservation());
  abandon.add_reservations(12345);
  v1::AbandonReply reply;
  ASSERT_TRUE(Call(engine_, &v1::Cache::Stub::Abandon, abandon, &reply).ok());
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, tokens).outcome(), static_cast<uint32_t>(ReserveOutcome::kGranted));
}

TEST_F(EngineServiceTest, LandingsThatDoNotFitAreRefusedBeforeAnythingIsWritten) {
  const std::vector<int32_t> prompt = Tokens(48, 7);
  const std::span<const int32_t> all(prompt);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, all.subspan(0, 24)), PublishOutcome::kPublished);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, all.subspan(24, 24)), PublishOutcome::kPublished);
  const std::string lease = engine_.Match(prompt, {24, 24})->lease();
  FillMemory();
  const std::vector<std::byte> before(engine_.memory(), engine_.memory() + TestEngine::kRegionBytes);
  const struct {
    const char* error;
    std::function<void(v1::LandRequest&)> spoil;
  } kCases[] = {
      {"lease: not 16 bytes", [](auto& r) { r.set_lease("short"); }},
      {"pages_id: unknown handle 999", [](auto& r) { r.set_pages_id(999); }},
      {"segments[1].segment: the match has 2", [](auto& r) { r.mutable_segments(1)->set_segment(2); }},
      {"segments[1].segment: given twice", [](auto& r) { r.mutable_segments(1)->set_segment(0); }},
      {"segments[0].first_position: a prefix stands at 0",
       [](auto& r) { r.mutable_segments(0)->set_first_position(4); }},
      {"segments[1].first_position: out of range",
       [](auto& r) { r.mutable_segments(1)->set_first_position(~uint64_t{0}); }},
      {"segments[1]: page_table: 64 entries are too few",
       [](auto& r) { r.mutable_segments(1)->set_first_position(4 * 64 - 20); }},
      {"segments[0]: page_table: 0 entries are too few", [](auto& r) { r.clear_page_table(); }},
      {"segments[0]: page_table[5]: 64 is not one of 64", [](auto& r) { r.set_page_table(5, TestEngine::kPages); }},
      {"segments[1]: page_table[8]: -3 is not one of 64", [](auto& r) { r.set_page_table(8, -3); }},
      {"segments: two of them would write position", [](auto& r) { r.mutable_segments(1)->set_first_position(10); }},
  };
  for (const auto& c : kCases) {
    v1::LandRequest request = engine_.LandRequest(lease, {At(0, 0), At(1, 24)});
    c.spoil(request);
    const auto verdict = engine_.Land(request);
    EXPECT_EQ(verdict.status().code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(verdict.status().message()), StartsWith(c.error));
  }
  EXPECT_EQ(std::memcmp(before.data(), engine_.memory(), before.size()), 0);

  // Pages of another model of the same tenant.
  Layout other = SmallLayout();
  other.tail = 3;
  TestEngine stranger(node_, other);
  auto attach = stranger.Make<v1::AttachLeaseRequest>();
  attach.set_lease(lease);
  v1::AttachLeaseReply attached;
  ASSERT_TRUE(Call(stranger, &v1::Cache::Stub::AttachLease, attach, &attached).ok());
  EXPECT_THAT(std::string(stranger.Land(stranger.LandRequest(lease, {At(1, 24)})).status().message()),
              StartsWith("pages_id: pages of another model"));
}

TEST_F(EngineServiceTest, ADroppedRegionTakesItsPagesAlong) {
  v1::SessionRequest drop;
  drop.mutable_drop_region()->set_region(engine_.region());
  ASSERT_TRUE(StatusOf(engine_.socket().Ask(drop)).ok());
  const auto verdict = engine_.Land(engine_.LandRequest(std::string(16, 'x'), {}));
  EXPECT_THAT(std::string(verdict.status().message()), StartsWith("pages_id: unknown handle"));
}

// Malformed requests of the other calls: each spoils one field of a request that is otherwise good.
template <typename Request, typename Reply>
void ExpectRefusals(TestEngine& engine,
                    grpc::Status (v1::Cache::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& good, grpc::StatusCode code,
                    const std::vector<std::pair<const char*, std::function<void(Request&)>>>& cases) {
  for (const auto& [error, spoil] : cases) {
    Request request = good;
    spoil(request);
    Reply reply;
    const grpc::Status status = Call(engine, method, request, &reply);
    EXPECT_EQ(status.error_code(), code) << error;
    EXPECT_THAT(status.error_message(), StartsWith(error));
  }
}

TEST_F(EngineServiceTest, MalformedOpenModelIsRefusedByName) {
  auto good = engine_.Make<v1::OpenModelRequest>();
  good.set_identity(EncodeIdentity(SmallIdentity()));
  good.set_layout(EncodeLayout(SmallLayout()));
  using R = v1::OpenModelRequest;
  const auto with_layout = [](std::function<void(Layout&)> change) {
    return [change](R& r) {
      Layout layout = SmallLayout();
      change(layout);
      r.set_layout(EncodeLayout(layout));
    };
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  ExpectRefusals<R, v1::OpenModelReply>(
      engine_, &v1::Cache::Stub::OpenModel, good, grpc::StatusCode::INVALID_ARGUMENT,
      {
          {"identity", [](R& r) { r.set_identity("noise"); }},
          {"layout", [](R& r) { r.clear_layout(); }},
          {"layout", [](R& r) { r.mutable_layout()->append("x"); }},
          {"layout.head", with_layout([](Layout& l) { l.head = 2; })},
          {"layout.layers[0].value_heads",
           with_layout([](Layout& l) { std::get<LinearLayer>(l.layers[0]).value_heads = 0; })},
          {"shard.first_layer", [](R& r) { r.mutable_shard()->set_first_layer(2); }},
          {"shard.layer_count", [](R& r) { r.mutable_shard()->set_layer_count(3); }},
          {"shard.tensor_parallel_rank", [](R& r) { r.mutable_shard()->set_tensor_parallel_rank(1); }},
          {"cost.flops_per_token:", [](R& r) { r.mutable_cost()->set_flops_per_token(-1); }},
          {"cost.flops_per_token_squared", [](R& r) { r.mutable_cost()->set_flops_per_token_squared(kNan); }},
          {"cost.tokens_per_second", [](R& r) { r.mutable_cost()->set_tokens_per_second(1.0 / 0.0); }},
      });
  ExpectRefusals<R, v1::OpenModelReply>(
      engine_, &v1::Cache::Stub::OpenModel, good, grpc::StatusCode::UNIMPLEMENTED,
      {
          {"shard.tensor_parallel_size", [](R& r) { r.mutable_shard()->set_tensor_parallel_size(2); }},
          {"shard.first_layer", [](R& r) { r.mutable_shard()->set_first_layer(1); }},
          {"shard.layer_count", [](R& r) { r.mutable_shard()->set_layer_count(1); }},
          {"layout.layers[0].family",
           with_layout([](Layout& l) { std::get<LinearLayer>(l.layers[0]).family = LinearFamily::kKda; })},
          {"layout.layers[0].state_dtype",
           with_layout([](Layout& l) { std::get<LinearLayer>(l.layers[0]).state_dtype = DType::kF16; })},
          {"layout.layers[1].dtype",
           with_layout([](Layout& l) { std::get<AttentionLayer>(l.layers[1]).dtype = DType::kBF16; })},
          {"layout.layers[1].kind", with_layout([](Layout& l) {
             auto& layer = std::get<AttentionLayer>(l.layers[1]);
             layer.kind = AttentionKind::kMla;
             layer.kv_heads = 1;
           })},
          {"layout.layers[1].stored",
           with_layout([](Layout& l) { std::get<AttentionLayer>(l.layers[1]).stored = StoredKeys::kUnrotated; })},
          {"layout.layers[1].rope.kind",
           with_layout([](Layout& l) { std::get<AttentionLayer>(l.layers[1]).rope.kind = RopeKind::kInterleaved; })},
      });
}

TEST_F(EngineServiceTest, MalformedDeclarePagesIsRefusedByName) {
  using R = v1::DeclarePagesRequest;
  ExpectRefusals<R, v1::DeclarePagesReply>(
      engine_, &v1::Cache::Stub::DeclarePages, engine_.PagesRequest(), grpc::StatusCode::INVALID_ARGUMENT,
      {
          {"model: unknown handle", [](R& r) { r.set_model(999); }},
          {"region: unknown handle", [](R& r) { r.set_region(999); }},
          {"page_tokens", [](R& r) { r.set_page_tokens(0); }},
          {"page_tokens", [](R& r) { r.set_page_tokens(1 << 20); }},
          {"pages: out of range", [](R& r) { r.set_pages(0); }},
          {"pages: out of range", [](R& r) { r.set_pages(0xffffffff); }},
          {"layers: attention layer 1 is missing", [](R& r) { r.clear_layers(); }},
          {"layers[1]: the layout has only 1", [](R& r) { *r.add_layers() = r.layers(0); }},
          {"layers[0].layer: expected attention layer 1", [](R& r) { r.mutable_layers(0)->set_layer(0); }},
          {"layers[0].key_offset: not aligned", [](R& r) { r.mutable_layers(0)->set_key_offset(2); }},
          {"layers[0].page_stride: not aligned", [](R& r) { r.mutable_layers(0)->set_page_stride(449); }},
          {"layers[0].token_stride: not aligned", [](R& r) { r.mutable_layers(0)->set_token_stride(113); }},
          {"layers[0].value_head_stride: not aligned", [](R& r) { r.mutable_layers(0)->set_value_head_stride(25); }},
          {"layers[0].key_offset: the last page ends outside",
           [](R& r) { r.mutable_layers(0)->set_key_offset(TestEngine::kRegionBytes); }},
          {"layers[0].value_offset: the last page ends outside",
           [](R& r) { r.mutable_layers(0)->set_value_offset(~uint64_t{3}); }},
          {"layers[0].key_offset: the last page ends outside",
           [](R& r) { r.mutable_layers(0)->set_page_stride(~uint64_t{3}); }},
          {"layers[0].key_offset: the last page ends outside", [](R& r) { r.set_pages(0x7fffffff); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_key_head_stride(0); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_token_stride(16); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_page_stride(0); }},
      });
}

TEST_F(EngineServiceTest, MalformedMatchReserveAndPublishAreRefusedByName) {
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(engine_.model());
  for (int i = 0; i < 3; ++i) {
    match.add_prompts()->set_tokens(PackTokens(Tokens(20, i)));
    for (int j = 0; j < 6; ++j) match.mutable_prompts(i)->add_segment_lengths(3);
  }
  using M = v1::MatchRequest;
  ExpectRefusals<M, v1::MatchReply>(
      engine_, &v1::Cache::Stub::Match, match, grpc::StatusCode::INVALID_ARGUMENT,
      {
          {"model: unknown handle", [](M& r) { r.set_model(999); }},
          {"prompts[2].segment_lengths[5]: zero", [](M& r) { r.mutable_prompts(2)->set_segment_lengths(5, 0); }},
          {"prompts[2].segment_lengths[5]: ends behind", [](M& r) { r.mutable_prompts(2)->set_segment_lengths(5, 6); }},
          {"prompts[1].segment_lengths[1]: ends behind",
           [](M& r) { r.mutable_prompts(1)->set_segment_lengths(1, ~uint64_t{0}); }},
          {"prompts[0].tokens: not a whole number", [](M& r) { r.mutable_prompts(0)->mutable_tokens()->append("x"); }},
          {"prompts[0].tokens: more than",
           [](M& r) { r.mutable_prompts(0)->set_tokens(std::string((limits::kMaxPromptTokens + 1) * 4, 'x')); }},
          {"prompts[0].segment_lengths: more than",
           [](M& r) { r.mutable_prompts(0)->mutable_segment_lengths()->Resize(limits::kMaxSegments + 1, 1); }},
          {"prompts: more than",
           [](M& r) {
             for (uint64_t i = 0; i < limits::kMaxPromptsPerCall; ++i) r.add_prompts();
           }},
      });

  auto reserve = engine_.Make<v1::ReserveRequest>();
  reserve.set_model(engine_.model());
  reserve.add_objects()->set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
  reserve.mutable_objects(0)->set_tokens(PackTokens(Tokens(20, 0)));
  using V = v1::ReserveRequest;
  ExpectRefusals<V, v1::ReserveReply>(
      engine_, &v1::Cache::Stub::Reserve, reserve, grpc::StatusCode::INVALID_ARGUMENT,
      {
          {"model: unknown handle", [](V& r) { r.set_model(999); }},
          {"objects[0].kind", [](V& r) { r.mutable_objects(0)->set_kind(2); }},
          {"objects[0].kind", [](V& r) { r.mutable_objects(0)->set_kind(257); }},
          {"objects[0].tokens: empty", [](V& r) { r.mutable_objects(0)->clear_tokens(); }},
          {"objects[0].tokens: not a whole", [](V& r) { r.mutable_objects(0)->set_tokens("abc"); }},
          {"objects: more than",
           [](V& r) {
             for (uint64_t i = 0; i < limits::kMaxObjectsPerCall; ++i) r.add_objects();
           }},
      });

  const std::vector<int32_t> tokens = Tokens(24, 7);
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  auto publish = engine_.Make<v1::PublishRequest>();
  *publish.add_objects() = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  using P = v1::PublishRequest;
  ExpectRefusals<P, v1::PublishReply>(
      engine_, &v1::Cache::Stub::Publish, publish, grpc::StatusCode::INVALID_ARGUMENT,
      {
          {"objects[0].provenance: unknown", [](P& r) { r.mutable_objects(0)->set_provenance(0); }},
          {"objects[0].provenance: composed", [](P& r) { r.mutable_objects(0)->set_provenance(2); }},
          {"objects[0].first_position", [](P& r) { r.mutable_objects(0)->set_first_position(~uint64_t{0}); }},
          {"objects[0].parts[0].form", [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_form(4); }},
          {"objects[0].parts[0].form", [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_form(258); }},
          {"objects[0].parts[3]: the same part",
           [](P& r) { *r.mutable_objects(0)->add_parts() = r.objects(0).parts(0); }},
          {"deadline_ns", [](P& r) { r.set_deadline_ns(-1); }},
          {"objects: more than",
           [](P& r) {
             for (uint64_t i = 0; i < limits::kMaxObjectsPerCall; ++i) *r.add_objects() = r.objects(0);
           }},
      });
  // None of that used the reservation up.
  EXPECT_EQ(engine_.Publish(publish.objects(0)), PublishOutcome::kPublished);
}

TEST_F(EngineServiceTest, UnknownAndEndedSessionsAreUnauthenticated) {
  std::string ended;
  {
    TestEngine gone(node_);
    ended = gone.secret();
  }
  const auto every_call = [&](const std::string& secret) {
    std::vector<grpc::Status> answers;
    const auto call = [&](auto method, auto request, auto reply) {
      request.set_session(secret);
      answers.push_back(Call(engine_, method, request, &reply));
    };
    using S = v1::Cache::Stub;
    call(&S::OpenModel, v1::OpenModelRequest(), v1::OpenModelReply());
    call(&S::DeclarePages, v1::DeclarePagesRequest(), v1::DeclarePagesReply());
    call(&S::Match, v1::MatchRequest(), v1::MatchReply());
    call(&S::Reserve, v1::ReserveRequest(), v1::ReserveReply());
    call(&S::Publish, v1::PublishRequest(), v1::PublishReply());
    call(&S::Abandon, v1::AbandonRequest(), v1::AbandonReply());
    call(&S::Release, v1::ReleaseRequest(), v1::ReleaseReply());
    call(&S::AttachLease, v1::AttachLeaseRequest(), v1::AttachLeaseReply());
    v1::LandRequest land;
    land.set_session(secret);
    const absl::Status landed = engine_.Land(land).status();
    answers.emplace_back(static_cast<grpc::StatusCode>(landed.code()), "");
    return answers;
  };
  for (const std::string& secret : {std::string(), std::string(16, '\0'), std::string(1000, 'x'),
                                    engine_.secret().substr(0, 15), engine_.secret() + "x"}) {
    for (const grpc::Status& status : every_call(secret)) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    }
  }
  EXPECT_TRUE(Eventually([&] {
    const std::vector<grpc::Status> answers = every_call(ended);
    return std::all_of(answers.begin(), answers.end(), [](const grpc::Status& status) {
      return status.error_code() == grpc::StatusCode::UNAUTHENTICATED;
    });
  }));
  // Whoever asks whether the landings of a session that is gone are quiet: they are.
  auto quiesce = engine_.Make<v1::QuiesceRequest>();
  quiesce.set_session(ended);
  v1::QuiesceReply quiet;
  EXPECT_TRUE(Call(engine_, &v1::Cache::Stub::Quiesce, quiesce, &quiet).ok());
}

TEST_F(EngineServiceTest, TheLongestPromptFits) {
  const std::vector<int32_t> tokens(limits::kMaxPromptTokens, -1);
  const auto match = engine_.Match(tokens, {limits::kMaxPromptTokens / 2, limits::kMaxPromptTokens / 2});
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->segments_size(), 2);
}

// grpc.health.v1.Health/Check, by its bytes: Debian ships the service without its .proto.
TEST_F(EngineServiceTest, AnswersTheStandardHealthCheck) {
  grpc::GenericStub health(
      grpc::CreateChannel(absl::StrCat("unix:", node_.rpc_socket()), grpc::InsecureChannelCredentials()));
  for (const std::string service : {"", "ashlar.v1.Cache"}) {
    // HealthCheckRequest { string service = 1; }
    const grpc::Slice request(service.empty() ? "" : absl::StrCat("\x0a", std::string(1, service.size()), service));
    const grpc::ByteBuffer request_bytes(&request, 1);
    grpc::ByteBuffer response_bytes;
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const auto call = health.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request_bytes, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&response_bytes, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    ASSERT_TRUE(status.ok()) << status.error_message();
    grpc::Slice response;
    ASSERT_TRUE(response_bytes.DumpToSingleSlice(&response).ok());
    // HealthCheckResponse { ServingStatus status = 1; } with SERVING = 1
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(response.begin()), response.size()), "\x08\x01") << service;
  }
}

// Runs `body` on a thread whose user is another one.
void AsUser(uid_t uid, const std::function<void()>& body) {
  std::thread([&] {
    // The system call changes this thread alone; glibc's function would change the process.
    ASSERT_EQ(syscall(SYS_setresuid, -1, uid, -1), 0);
    body();
  }).join();
}

TEST(EngineServiceTenants, AnotherTenantsLeaseAndObjectsDoNotExist) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be two users";
  const TestNode node("tenants: [{name: a, uids: [0], dram_bytes: 4MiB}, {name: b, uids: [54321], dram_bytes: 4MiB}]");
  const std::vector<int32_t> tokens = Tokens(24, 7);
  TestEngine a(node);
  ASSERT_EQ(a.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const std::string lease = a.Match(tokens, {24})->lease();
  ASSERT_EQ(lease.size(), 16u);
  std::unique_ptr<RawSession> socket;
  AsUser(54321, [&] { socket = std::make_unique<RawSession>(node); });
  const auto b = std::make_unique<TestEngine>(node, SmallLayout(), std::move(socket));
  ASSERT_EQ(b->tenant(), "b");
  auto attach = b->Make<v1::AttachLeaseRequest>();
  attach.set_lease(lease);
  v1::AttachLeaseReply attached;
  EXPECT_EQ(Call(*b, &v1::Cache::Stub::AttachLease, attach, &attached).error_code(), grpc::StatusCode::NOT_FOUND);
  const auto verdict = b->Land(b->LandRequest(lease, {At(0, 0)}));
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kLeaseLost));
  auto release = b->Make<v1::ReleaseRequest>();
  release.add_leases(lease);
  v1::ReleaseReply released;
  EXPECT_TRUE(Call(*b, &v1::Cache::Stub::Release, release, &released).ok());
  EXPECT_EQ(b->Match(tokens, {24})->segments(0).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));

  v1::SessionRequest arena;
  arena.mutable_get_arena()->set_arena(a.Match(tokens, {24})->segments(0).extents(0).arena());
  UniqueFd memfd;
  ASSERT_TRUE(StatusOf(a.socket().Ask(arena, {}, &memfd)).ok());
  ASSERT_TRUE(memfd.valid());
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0), MAP_FAILED);
  EXPECT_EQ(StatusOf(b->socket().Ask(arena)).code(), absl::StatusCode::kNotFound);
  // The lease still is a's.
  EXPECT_THAT(*a.Land(a.LandRequest(lease, {At(0, 0)})), ElementsAre(MissReason::kNone));
}

// The service alone, over a loop that a test can hold still.
class BoundedQueueTest : public ::testing::Test {
 protected:
  static constexpr size_t kDepth = 2;

  void SetUp() override {
    tier_ = *storage::MemoryTier::Make({.capacity_bytes = 1 << 20, .arena_bytes = 1 << 20});
    ASSERT_TRUE(tier_->AddTenant(0, 1 << 20).ok());
    mover_.emplace(kernels::Reference(), threads_, workers_, *tier_);
    cache_.emplace(storage::CacheOptions{.random = [this] { return ++random_; }}, *tier_, *mover_, clock_, nullptr);
    table_.emplace(*cache_, loop_);
    service_.emplace(*cache_, loop_, *table_, kDepth);
    loop_.Start();
    Session::Description about;
    about.secret = "sixteen bytes ok";
    session_ = std::make_shared<Session>(about);
    std::promise<void> opened;
    ASSERT_TRUE(table_->Open(session_, [&] { opened.set_value(); }).ok());
    opened.get_future().wait();
    auto model = std::make_shared<Model>();
    model->layout = SmallLayout();
    model_ = *session_->AddModel(model);
  }
  void TearDown() override {
    if (held_) hold_.set_value();
    workers_.Stop();
    loop_.Stop();
  }
  void FillQueue() {
    std::promise<void> held;
    ASSERT_TRUE(loop_.Post([this, &held] {
      held.set_value();
      hold_.get_future().wait();
    }));
    held.get_future().wait();
    held_ = true;
    for (size_t i = 0; i < kDepth; ++i) ASSERT_TRUE(loop_.Post([] {}));
  }

  MonotonicClock clock_;
  uint64_t random_ = 0;
  std::promise<void> hold_;
  bool held_ = false;
  EventLoop loop_{kDepth, clock_};
  kernels::ThreadPool threads_{1};
  WorkerPool workers_{1, 8, loop_};
  std::unique_ptr<storage::MemoryTier> tier_;
  std::optional<storage::Mover> mover_;
  std::optional<storage::Cache> cache_;
  std::optional<SessionTable> table_;
  std::optional<EngineService> service_;
  std::shared_ptr<Session> session_;
  uint64_t model_ = 0;
};

TEST_F(BoundedQueueTest, AFullQueueAnswersAtOnceAndStillTakesReleases) {
  FillQueue();
  v1::MatchRequest match;
  match.set_session(session_->about().secret);
  match.set_model(model_);
  v1::MatchReply matched;
  absl::Status answer;
  service_->Match(match, &matched, [&](absl::Status status) { answer = status; });
  EXPECT_EQ(answer.code(), absl::StatusCode::kResourceExhausted) << "answered on the caller's thread, without waiting";

  // These give something back: they wait for their turn.
  v1::ReleaseRequest release;
  release.set_session(session_->about().secret);
  v1::ReleaseReply released;
  std::promise<absl::Status> release_answer;
  service_->Release(release, &released, [&](absl::Status status) { release_answer.set_value(status); });
  v1::QuiesceRequest quiesce;
  quiesce.set_session(session_->about().secret);
  v1::QuiesceReply quiet;
  std::promise<absl::Status> quiesce_answer;
  service_->Quiesce(quiesce, &quiet, [&](absl::Status status) { quiesce_answer.set_value(status); });
  auto release_future = release_answer.get_future();
  EXPECT_EQ(release_future.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
  hold_.set_value();
  EXPECT_TRUE(release_future.get().ok());
  EXPECT_TRUE(quiesce_answer.get_future().get().ok());
  held_ = false;
}

TEST_F(BoundedQueueTest, ASessionThatEndsMeanwhileIsUnauthenticated) {
  FillQueue();
  v1::ReleaseRequest release;
  release.set_session(session_->about().secret);
  v1::ReleaseReply released;
  std::promise<absl::Status> answer;
  // Posted behind the close, though the session was found before it.
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

TEST(LandingLedger, RemembersBoundedlyAndNeverForgetsTowardsWriting) {
  LandingLedger ledger;
  EXPECT_TRUE(ledger.MayStart(0));
  ledger.Silence(5);
  EXPECT_FALSE(ledger.MayStart(5));
  EXPECT_TRUE(ledger.MayStart(4));
  for (uint64_t i = 0; i < 2 * LandingLedger::kRemembered; ++i) ledger.Silence(10 + 2 * i);
  EXPECT_FALSE(ledger.MayStart(5)) << "forgotten by raising the floor above it";
  EXPECT_FALSE(ledger.MayStart(10));
  EXPECT_FALSE(ledger.MayStart(10 + 2 * (2 * LandingLedger::kRemembered - 1)));
  EXPECT_TRUE(ledger.MayStart(10 + 2 * (2 * LandingLedger::kRemembered - 1) + 1));
}

}  // namespace
}  // namespace ashlar::daemon
