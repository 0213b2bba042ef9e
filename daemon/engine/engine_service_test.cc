// SPDX-License-Identifier: Apache-2.0
// The calls of ashlar.v1.Cache over gRPC, with raw stubs.
#include "daemon/engine/engine_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

class EngineServiceTest : public ::testing::Test {
 protected:
  TestNode node_;
  TestEngine engine_{node_};
};

TEST_F(EngineServiceTest, OpenModelNamesTheNamespace) {
  auto request = engine_.Make<v1::OpenModelRequest>();
  request.set_identity(EncodeIdentity(SmallIdentity()));
  request.set_layout(EncodeLayout(SmallLayout()));
  v1::OpenModelReply reply;
  ASSERT_TRUE(engine_.Call(request, &reply).ok());
  const NamespaceId expected = MakeNamespace("default", SmallIdentity(), SmallLayout());
  EXPECT_EQ(reply.ns(), std::string(reinterpret_cast<const char*>(expected.bytes.data()), 32));
  EXPECT_EQ(reply.tenant(), "default");
  EXPECT_NE(reply.model(), engine_.model());
}

// Head 0 has rank 2, and the others are zero, as in the table. The bytes reserved for dense heads are freed.
TEST_F(EngineServiceTest, PublishesInDeclaredForms) {
  Layout layout = SmallLayout();
  auto& linear = std::get<LinearLayer>(layout.layers[0]);
  linear.d_k = 128;
  linear.value_heads = 4;
  TestEngine engine(node_, layout);
  engine.FillMemory();
  const std::vector<int32_t> tokens = Ascending(24, 7);
  const v1::ReserveResult reserved = engine.Reserve(ObjectKind::kSegment, tokens);
  v1::PublishObject object = engine.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  v1::PartSource* low_rank = object.mutable_parts(0);
  low_rank->set_form(static_cast<uint32_t>(PartForm::kTransitionLowRank));
  low_rank->set_heads(1);
  low_rank->set_rank(2);
  v1::PartSource* zero = object.add_parts();
  zero->set_form(static_cast<uint32_t>(PartForm::kTransitionZero));
  zero->set_first_head(1);
  zero->set_heads(3);
  ASSERT_EQ(engine.Publish(object), PublishOutcome::kPublished);
  const auto match = engine.Match(Ascending(28, 3), {4, 24});
  ASSERT_TRUE(match.ok());
  ASSERT_EQ(match->segments(1).miss_reason(), 0u);
  const ObjectHeader natural = *PlanObject(layout, {}, {}, ObjectKind::kSegment, 24);
  constexpr uint64_t kDense = 128 * 128 * 4, kLowRank = 128 * 4 + 2 * 2 * 128 * 4;
  EXPECT_LE(match->segments(1).bytes(), natural.bytes - 4 * kDense + kLowRank + 256);
  EXPECT_EQ(natural.Extents(), 2u);
  ASSERT_EQ(match->segments(1).extents_size(), 1);
  EXPECT_EQ(match->segments(1).extents(0).count(), 1u);
  const auto landed = engine.Land(engine.LandRequest(match->lease(), {At(1, 4)}));
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_THAT(*landed, ElementsAre(MissReason::kNone));
}

TEST_F(EngineServiceTest, MissThenPublishThenHit) {
  const std::vector<int32_t> prompt = Ascending(64, 1);
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

  // A second publisher gets the same outcome.
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, all.subspan(16, 32)).outcome(),
            static_cast<uint32_t>(ReserveOutcome::kAlreadyPresent));
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, all.subspan(0, 6)).outcome(),
            static_cast<uint32_t>(ReserveOutcome::kTooShort));
}

TEST_F(EngineServiceTest, QuiesceBeforeItsLandingPreventsWrites) {
  engine_.FillMemory();
  const std::vector<int32_t> tokens = Ascending(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const auto match = engine_.Match(tokens, {24});
  ASSERT_TRUE(match.ok());
  std::memset(engine_.memory(), 0, TestEngine::kTensors);
  const v1::LandRequest landing = engine_.LandRequest(match->lease(), {At(0, 0)});
  v1::QuiesceReply reply;
  ASSERT_TRUE(engine_.Call(engine_.QuiesceRequest(landing.landing()), &reply).ok());
  const auto verdict = engine_.Land(landing);
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kCancelled));
  EXPECT_EQ(*engine_.Value(0, 0, 0), 0.0f);
  const auto again = engine_.Land(engine_.LandRequest(match->lease(), {At(0, 0)}));
  ASSERT_TRUE(again.ok());
  EXPECT_THAT(*again, ElementsAre(MissReason::kNone));
  EXPECT_NE(*engine_.Value(0, 0, 0), 0.0f);
}

TEST_F(EngineServiceTest, LooksUpAndLandsUnderTheLeaseThatTheClientNamed) {
  engine_.FillMemory();
  const std::vector<int32_t> prompt = Ascending(64, 1);
  const std::span<const int32_t> all(prompt);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, all.subspan(0, 16)), PublishOutcome::kPublished);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, all.subspan(32, 32)), PublishOutcome::kPublished);
  std::memset(engine_.memory(), 0, TestEngine::kTensors);
  const std::string lease(16, 'n');
  const auto landed = engine_.LookupAndLand(engine_.LookupAndLandRequest(prompt, {16, 16, 32}, lease));
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_EQ(landed->match.lease(), lease);
  EXPECT_EQ(landed->match.prefix_depth(), 16u);
  EXPECT_EQ(landed->match.segments(1).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));
  EXPECT_THAT(landed->verdict, ElementsAre(MissReason::kNone, MissReason::kNone));
  EXPECT_NE(*engine_.Value(0, 0, 0), 0.0f);

  // The lease id is in use for all sessions.
  TestEngine other(node_);
  const auto taken = other.LookupAndLand(other.LookupAndLandRequest(prompt, {16, 16, 32}, lease));
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->match.lease(), "");
  for (const v1::SegmentMatch& segment : taken->match.segments()) {
    EXPECT_EQ(segment.miss_reason(), static_cast<uint32_t>(MissReason::kInvalidRequest));
  }
  EXPECT_TRUE(taken->verdict.empty());

  auto release = engine_.Make<v1::ReleaseRequest>();
  release.add_leases(lease);
  v1::ReleaseReply released;
  ASSERT_TRUE(engine_.Call(release, &released).ok());
  EXPECT_EQ(other.LookupAndLand(other.LookupAndLandRequest(prompt, {16, 16, 32}, lease))->match.lease(), lease);
}

TEST_F(EngineServiceTest, QuiesceBeforeItsLookupPreventsALease) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const v1::LookupAndLandRequest request = engine_.LookupAndLandRequest(tokens, {24}, std::string(16, 'n'));
  v1::QuiesceReply reply;
  ASSERT_TRUE(engine_.Call(engine_.QuiesceRequest(request.landing()), &reply).ok());
  EXPECT_EQ(engine_.LookupAndLand(request).status().code(), absl::StatusCode::kCancelled);
  const auto verdict = engine_.Land(engine_.LandRequest(request.lease(), {At(0, 0)}));
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kLeaseLost));
}

TEST_F(EngineServiceTest, ReleasedAndInventedLeasesAreMisses) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const auto match = engine_.Match(tokens, {24});
  ASSERT_TRUE(match.ok());
  auto release = engine_.Make<v1::ReleaseRequest>();
  release.add_leases(match->lease());
  release.add_leases(match->lease());
  v1::ReleaseReply released;
  ASSERT_TRUE(engine_.Call(release, &released).ok());
  for (const std::string& lease : {match->lease(), std::string(16, 'x')}) {
    const auto verdict = engine_.Land(engine_.LandRequest(lease, {At(0, 0), At(1, 40)}));
    ASSERT_TRUE(verdict.ok());
    EXPECT_THAT(*verdict, ElementsAre(MissReason::kLeaseLost, MissReason::kLeaseLost));
  }
}

TEST_F(EngineServiceTest, AnAttachedLeaseOutlivesItsFirstHolder) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  std::string lease;
  {
    TestEngine first(node_);
    ASSERT_EQ(first.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
    lease = first.Match(tokens, {24})->lease();
    auto attach = engine_.Make<v1::AttachLeaseRequest>();
    attach.set_lease(lease);
    attach.set_model(engine_.model());
    v1::AttachLeaseReply reply;
    ASSERT_TRUE(engine_.Call(attach, &reply).ok());
    EXPECT_EQ(reply.match().lease(), lease);
    EXPECT_EQ(reply.match().prefix_depth(), 24u);
    ASSERT_EQ(reply.match().segments_size(), 1);
  }
  const auto verdict = engine_.Land(engine_.LandRequest(lease, {At(0, 0)}));
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kNone));
  auto unknown = engine_.Make<v1::AttachLeaseRequest>();
  unknown.set_lease(std::string(16, 'x'));
  unknown.set_model(engine_.model());
  v1::AttachLeaseReply reply;
  EXPECT_EQ(engine_.Call(unknown, &reply).code(), absl::StatusCode::kNotFound);
}

TEST_F(EngineServiceTest, AbandonAllowsAnotherReservation) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  auto abandon = engine_.Make<v1::AbandonRequest>();
  abandon.add_reservations(reserved.reservation());
  abandon.add_reservations(12345);
  v1::AbandonReply reply;
  ASSERT_TRUE(engine_.Call(abandon, &reply).ok());
  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, tokens).outcome(), static_cast<uint32_t>(ReserveOutcome::kGranted));
}

TEST_F(EngineServiceTest, DroppingARegionDropsItsPages) {
  v1::SessionRequest drop;
  drop.mutable_drop_region()->set_region(engine_.region());
  ASSERT_TRUE(StatusOf(engine_.socket().Ask(drop)).ok());
  const auto verdict = engine_.Land(engine_.LandRequest(std::string(16, 'x'), {}));
  EXPECT_THAT(std::string(verdict.status().message()), StartsWith("pages_id: unknown handle"));
}

TEST_F(EngineServiceTest, PagesEndWithTheNextDeclarationOrTheirModel) {
  const auto named = [&](uint64_t pages) {
    v1::LandRequest request = engine_.LandRequest(std::string(16, 'x'), {});
    request.set_pages_id(pages);
    return engine_.Land(request).ok();
  };
  EXPECT_TRUE(named(engine_.pages()));
  v1::DeclarePagesReply again;
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(engine_.Call(engine_.PagesRequest(), &again).ok()) << i;
  EXPECT_FALSE(named(engine_.pages()));
  EXPECT_TRUE(named(again.pages_id()));
  auto close = engine_.Make<v1::CloseModelRequest>();
  close.set_model(engine_.model());
  v1::CloseModelReply closed;
  for (int twice = 0; twice < 2; ++twice) EXPECT_TRUE(engine_.Call(close, &closed).ok());
  EXPECT_FALSE(named(again.pages_id()));
  EXPECT_THAT(std::string(engine_.Call(engine_.PagesRequest(), &again).message()), StartsWith("model: unknown handle"));
  EXPECT_THAT(std::string(engine_.Match(Ascending(64, 1), {16, 32}).status().message()),
              StartsWith("model: unknown handle"));
}

TEST_F(EngineServiceTest, UnknownAndEndedSessionsAreUnauthenticated) {
  std::string ended;
  {
    TestEngine gone(node_);
    ended = gone.secret();
  }
  const auto every_call = [&](const std::string& secret) {
    std::vector<absl::Status> answers;
    const auto call = [&](auto request, auto reply) {
      request.set_session(secret);
      answers.push_back(engine_.Call(request, &reply));
    };
    call(v1::OpenModelRequest(), v1::OpenModelReply());
    call(v1::DeclarePagesRequest(), v1::DeclarePagesReply());
    call(v1::MatchRequest(), v1::MatchReply());
    call(v1::ReserveRequest(), v1::ReserveReply());
    call(v1::PublishRequest(), v1::PublishReply());
    call(v1::AbandonRequest(), v1::AbandonReply());
    call(v1::ReleaseRequest(), v1::ReleaseReply());
    call(v1::AttachLeaseRequest(), v1::AttachLeaseReply());
    v1::LandRequest land;
    land.set_session(secret);
    answers.push_back(engine_.Land(land).status());
    return answers;
  };
  for (const std::string& secret : {std::string(), std::string(16, '\0'), std::string(1000, 'x'),
                                    engine_.secret().substr(0, 15), engine_.secret() + "x"}) {
    for (const absl::Status& status : every_call(secret)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
    }
  }
  EXPECT_TRUE(Eventually([&] {
    const std::vector<absl::Status> answers = every_call(ended);
    return std::all_of(answers.begin(), answers.end(), absl::IsUnauthenticated);
  }));
  // The landings of a closed session are quiesced.
  v1::QuiesceRequest quiesce = engine_.QuiesceRequest(0);
  quiesce.set_session(ended);
  v1::QuiesceReply quiesced;
  EXPECT_TRUE(engine_.Call(quiesce, &quiesced).ok());
}

// A session of another daemon process may have landings for which that daemon, still draining, writes.
TEST_F(EngineServiceTest, RefusesOtherDaemonEpoch) {
  for (const std::string& run : {std::string(), std::string(kSecretBytes, 'x')}) {
    v1::QuiesceRequest quiesce = engine_.QuiesceRequest(0);
    quiesce.set_session(std::string(kSecretBytes, 's'));
    quiesce.set_daemon_epoch(run);
    v1::QuiesceReply reply;
    const absl::Status status = engine_.Call(quiesce, &reply);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), testing::StartsWith("daemon_epoch:"));
  }
}

TEST_F(EngineServiceTest, TheLongestPromptFits) {
  const std::vector<int32_t> tokens(limits::kMaxPromptTokens, -1);
  const auto match = engine_.Match(tokens, {limits::kMaxPromptTokens / 2, limits::kMaxPromptTokens / 2});
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->segments_size(), 2);
}

TEST_F(EngineServiceTest, AnswersTheStandardHealthCheck) {
  for (const char* service : {"", "ashlar.v1.Cache"})
    EXPECT_EQ(Health(node_.rpc_socket(), service), kServing) << service;
}

// Dimensions that turn together as pair i.
struct Pairing {
  RopeStyle kind;
  std::array<std::array<int, 2>, 2> pairs;
};
std::string NameOf(const Pairing& pairing) {
  return pairing.kind == RopeStyle::kInterleaved ? "Interleaved" : "HalfSplit";
}
void PrintTo(const Pairing& pairing, std::ostream* out) {
  *out << NameOf(pairing);
}

class EngineServiceRope : public ::testing::TestWithParam<Pairing> {};

TEST_P(EngineServiceRope, LandsKeysRotatedToTheirPosition) {
  Layout layout = SmallLayout();
  std::get<AttentionLayer>(layout.layers[1]).rope.kind = GetParam().kind;
  const TestNode node;
  TestEngine engine(node, layout);
  engine.FillMemory();
  const auto& attention = std::get<AttentionLayer>(layout.layers[1]);
  const std::vector<int32_t> tokens = Ascending(24, 7);
  ASSERT_EQ(engine.PublishRun(ObjectKind::kSegment, tokens), PublishOutcome::kPublished);
  const std::vector<std::byte> published(engine.memory(), engine.memory() + TestEngine::kRegionBytes);

  // The same text after a prefix that is not cached.
  std::vector<int32_t> prompt = Ascending(8, 1000);
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  const auto match = engine.Match(prompt, {8, 24});
  ASSERT_TRUE(match.ok());
  constexpr uint64_t kPosition = 100;
  const auto verdict = engine.Land(engine.LandRequest(match->lease(), {At(1, kPosition)}));
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kNone));

  const auto original = [&](float* row) {
    return reinterpret_cast<const float*>(published.data() + (reinterpret_cast<std::byte*>(row) - engine.memory()));
  };
  for (uint32_t t = layout.head; t < 24 - layout.tail; ++t) {
    for (uint32_t head = 0; head < attention.kv_heads; ++head) {
      const uint64_t p = kPosition + t;
      const float* key = engine.Key(static_cast<int32_t>(p / 4), p % 4, head);
      const float* value = engine.Value(static_cast<int32_t>(p / 4), p % 4, head);
      const float* old_key = original(engine.Key(static_cast<int32_t>(t / 4), t % 4, head));
      const float* old_value = original(engine.Value(static_cast<int32_t>(t / 4), t % 4, head));
      for (int i = 0; i < 2; ++i) {
        const auto [a, b] = GetParam().pairs[i];
        const double angle = kPosition * attention.rope.frequencies[i];
        const double x = old_key[a], y = old_key[b];
        EXPECT_NEAR(key[a], x * std::cos(angle) - y * std::sin(angle), 1e-2);
        EXPECT_NEAR(key[b], x * std::sin(angle) + y * std::cos(angle), 1e-2);
      }
      for (uint32_t i = 4; i < attention.key_dim; ++i) EXPECT_EQ(key[i], old_key[i]);
      for (uint32_t i = 0; i < attention.value_dim; ++i) EXPECT_EQ(value[i], old_value[i]);
    }
  }
  // Only the interior was written.
  const uint64_t before = kPosition + layout.head - 1, behind = kPosition + 24 - layout.tail;
  EXPECT_EQ(*engine.Key(before / 4, before % 4, 0), *original(engine.Key(before / 4, before % 4, 0)));
  EXPECT_EQ(*engine.Key(behind / 4, behind % 4, 0), *original(engine.Key(behind / 4, behind % 4, 0)));
}

INSTANTIATE_TEST_SUITE_P(Pairings, EngineServiceRope,
                         ::testing::Values(Pairing{RopeStyle::kHalfSplit, {{{0, 2}, {1, 3}}}},
                                           Pairing{RopeStyle::kInterleaved, {{{0, 1}, {2, 3}}}}),
                         [](const auto& instance) { return NameOf(instance.param); });

TEST(EngineServiceTenants, AnotherTenantsLeaseAndObjectsDoNotExist) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be two users";
  const TestNode node("tenants: [{name: a, uids: [0], dram_bytes: 4MiB}, {name: b, uids: [54321], dram_bytes: 4MiB}]");
  const std::vector<int32_t> tokens = Ascending(24, 7);
  TestEngine a(node);
  ASSERT_EQ(a.PublishRun(ObjectKind::kCheckpoint, tokens), PublishOutcome::kPublished);
  const std::string lease = a.Match(tokens, {24})->lease();
  ASSERT_EQ(lease.size(), 16u);
  std::unique_ptr<TestEngine> b;
  AsUser(54321, [&] { b = std::make_unique<TestEngine>(node); });
  ASSERT_EQ(b->tenant(), "b");
  auto attach = b->Make<v1::AttachLeaseRequest>();
  attach.set_lease(lease);
  attach.set_model(b->model());
  v1::AttachLeaseReply attached;
  EXPECT_EQ(b->Call(attach, &attached).code(), absl::StatusCode::kNotFound);
  const auto verdict = b->Land(b->LandRequest(lease, {At(0, 0)}));
  ASSERT_TRUE(verdict.ok());
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kLeaseLost));
  auto release = b->Make<v1::ReleaseRequest>();
  release.add_leases(lease);
  v1::ReleaseReply released;
  EXPECT_TRUE(b->Call(release, &released).ok());
  EXPECT_EQ(b->Match(tokens, {24})->segments(0).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));

  v1::SessionRequest arena;
  arena.mutable_get_arena()->set_arena(a.Match(tokens, {24})->segments(0).extents(0).arena());
  UniqueFd memfd;
  ASSERT_TRUE(StatusOf(a.socket().Ask(arena, {}, &memfd)).ok());
  ASSERT_TRUE(memfd.valid());
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0), MAP_FAILED);
  EXPECT_EQ(StatusOf(b->socket().Ask(arena)).code(), absl::StatusCode::kNotFound);
  // The lease is still a's.
  EXPECT_THAT(*a.Land(a.LandRequest(lease, {At(0, 0)})), ElementsAre(MissReason::kNone));
}

}  // namespace
}  // namespace ashlar::daemon
