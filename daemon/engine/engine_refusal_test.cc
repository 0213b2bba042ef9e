// SPDX-License-Identifier: Apache-2.0
// Invalid fields of the calls of ashlar.v1.Cache: each is refused by name and changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

class EngineRefusalTest : public ::testing::Test {
 protected:
  TestNode node_;
  TestEngine engine_{node_};
};

TEST_F(EngineRefusalTest, BadSourcesEndOnlyTheirReservation) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
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
      {"groups of pages that have none",
       [](auto& o) { o.add_group_pages(static_cast<uint32_t>(o.page_table_size())); }},
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
  // A page that the interior does not touch need not exist.
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  v1::PublishObject object = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  object.set_page_table(0, -1);
  EXPECT_EQ(engine_.Publish(object), PublishOutcome::kPublished);
}

TEST_F(EngineRefusalTest, LookupsThatCannotLandAreRefusedWithoutALease) {
  const std::vector<int32_t> prompt = Ascending(48, 7);
  const std::span<const int32_t> all(prompt);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, all.subspan(0, 24)), PublishOutcome::kPublished);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, all.subspan(24, 24)), PublishOutcome::kPublished);
  engine_.FillMemory();
  const std::vector<std::byte> before(engine_.memory(), engine_.memory() + TestEngine::kRegionBytes);
  const struct {
    const char* error;
    std::function<void(v1::LookupAndLandRequest&)> spoil;
  } kCases[] = {
      {"lease: wrong length; expected 16 bytes", [](auto& r) { r.set_lease("short"); }},
      {"lease: all zero", [](auto& r) { r.set_lease(std::string(16, '\0')); }},
      {"model: unknown handle 999", [](auto& r) { r.set_model(999); }},
      {"pages_id: unknown handle 999", [](auto& r) { r.set_pages_id(999); }},
      {"prompt.needed_in_ns: ", [](auto& r) { r.mutable_prompt()->set_needed_in_ns(1); }},
      {"prompt.tokens: ", [](auto& r) { r.mutable_prompt()->set_tokens("odd"); }},
      {"prompt.segment_lengths[1]: exceeds the tokens left",
       [](auto& r) { r.mutable_prompt()->set_segment_lengths(1, 25); }},
      {"segments[0]: page_table: 0 entries are too few", [](auto& r) { r.clear_page_table(); }},
      {"segments[1]: page_table[8]: page -3 is out of range; 64", [](auto& r) { r.set_page_table(8, -3); }},
      {"segments[1]: page_table[9]: names the same page as page_table[0]", [](auto& r) { r.set_page_table(9, 0); }},
      {"group_pages: the pages were declared without groups",
       [](auto& r) { r.add_group_pages(static_cast<uint32_t>(r.page_table_size())); }},
  };
  for (const auto& c : kCases) {
    v1::LookupAndLandRequest request = engine_.LookupAndLandRequest(prompt, {24, 24}, std::string(16, 'n'));
    c.spoil(request);
    const auto landed = engine_.LookupAndLand(request);
    EXPECT_EQ(landed.status().code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(landed.status().message()), StartsWith(c.error));
    const auto lost = engine_.Land(engine_.LandRequest(std::string(16, 'n'), {At(0, 0)}));
    ASSERT_TRUE(lost.ok());
    EXPECT_EQ(*lost, std::vector<MissReason>(1, MissReason::kLeaseLost)) << c.error;
  }
  EXPECT_EQ(std::memcmp(before.data(), engine_.memory(), before.size()), 0);
}

TEST_F(EngineRefusalTest, LandingsThatDoNotFitAreRefusedBeforeAnythingIsWritten) {
  const std::vector<int32_t> prompt = Ascending(48, 7);
  const std::span<const int32_t> all(prompt);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, all.subspan(0, 24)), PublishOutcome::kPublished);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, all.subspan(24, 24)), PublishOutcome::kPublished);
  const std::string lease = engine_.Match(prompt, {24, 24})->lease();
  engine_.FillMemory();
  const std::vector<std::byte> before(engine_.memory(), engine_.memory() + TestEngine::kRegionBytes);
  const struct {
    const char* error;
    std::function<void(v1::LandRequest&)> spoil;
  } kCases[] = {
      {"lease: wrong length; expected 16 bytes", [](auto& r) { r.set_lease("short"); }},
      {"pages_id: unknown handle 999", [](auto& r) { r.set_pages_id(999); }},
      {"segments[1].segment: out of range; the match has 2", [](auto& r) { r.mutable_segments(1)->set_segment(2); }},
      {"segments[1].segment: given twice", [](auto& r) { r.mutable_segments(1)->set_segment(0); }},
      {"tuples_only[1]: given twice",
       [](auto& r) {
         r.add_tuples_only(2);
         r.add_tuples_only(0);
       }},
      {"segments[0].first_position: must be 0 for a prefix",
       [](auto& r) { r.mutable_segments(0)->set_first_position(4); }},
      {"segments[1].first_position: out of range",
       [](auto& r) { r.mutable_segments(1)->set_first_position(~uint64_t{0}); }},
      {"segments[1]: page_table: 64 entries are too few",
       [](auto& r) { r.mutable_segments(1)->set_first_position(4 * 64 - 20); }},
      {"segments[0]: page_table: 0 entries are too few", [](auto& r) { r.clear_page_table(); }},
      {"segments[0]: page_table[5]: page 64 is out of range; 64",
       [](auto& r) { r.set_page_table(5, TestEngine::kPages); }},
      {"segments[1]: page_table[8]: page -3 is out of range; 64", [](auto& r) { r.set_page_table(8, -3); }},
      {"segments[0]: page_table[5]: names the same page as page_table[2]", [](auto& r) { r.set_page_table(5, 2); }},
      {"segments[1]: page_table[9]: names the same page as page_table[0]", [](auto& r) { r.set_page_table(9, 0); }},
      {"segments: two segments overlap at position", [](auto& r) { r.mutable_segments(1)->set_first_position(10); }},
      {"group_pages: the pages were declared without groups", [](auto& r) { r.add_group_pages(1); }},
  };
  for (const auto& c : kCases) {
    v1::LandRequest request = engine_.LandRequest(lease, {At(0, 0), At(1, 24)});
    c.spoil(request);
    const auto verdict = engine_.Land(request);
    EXPECT_EQ(verdict.status().code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(verdict.status().message()), StartsWith(c.error));
  }
  EXPECT_EQ(std::memcmp(before.data(), engine_.memory(), before.size()), 0);

  // Pages that the landing does not write may be repeated: a table may be padded.
  v1::LandRequest padded = engine_.LandRequest(lease, {At(0, 0), At(1, 24)});
  for (int entry = 12; entry < padded.page_table_size(); ++entry) padded.set_page_table(entry, 0);
  const auto landed = engine_.Land(padded);
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_EQ(*landed, std::vector<MissReason>(2, MissReason::kNone));

  // Pages of another model of the same tenant.
  Layout other = SmallLayout();
  other.tail = 3;
  TestEngine stranger(node_, other);
  auto attach = stranger.Make<v1::AttachLeaseRequest>();
  attach.set_lease(lease);
  attach.set_model(stranger.model());
  v1::AttachLeaseReply attached;
  ASSERT_TRUE(stranger.Call(attach, &attached).ok());
  EXPECT_THAT(std::string(stranger.Land(stranger.LandRequest(lease, {At(1, 24)})).status().message()),
              StartsWith("pages_id: the pages belong to a different model"));
}

TEST_F(EngineRefusalTest, MalformedOpenModelIsRefusedByName) {
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
      engine_, good, absl::StatusCode::kInvalidArgument,
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
          {"shard.tensor_parallel_size: too large; expected at most 256",
           [](R& r) { r.mutable_shard()->set_tensor_parallel_size(257); }},
          {"layout.layers[0].value_heads: 2 is not divisible by 3",
           [](R& r) { r.mutable_shard()->set_tensor_parallel_size(3); }},
          {"cost.flops_per_token:", [](R& r) { r.mutable_cost()->set_flops_per_token(-1); }},
          {"cost.flops_per_token_squared", [](R& r) { r.mutable_cost()->set_flops_per_token_squared(kNan); }},
          {"cost.tokens_per_second", [](R& r) { r.mutable_cost()->set_tokens_per_second(1.0 / 0.0); }},
      });
  ExpectRefusals<R, v1::OpenModelReply>(engine_, good, absl::StatusCode::kUnimplemented,
                                        {
                                            {"shard.first_layer", [](R& r) { r.mutable_shard()->set_first_layer(1); }},
                                            {"shard.layer_count", [](R& r) { r.mutable_shard()->set_layer_count(1); }},
                                        });
}

TEST_F(EngineRefusalTest, MalformedDeclarePagesIsRefusedByName) {
  using R = v1::DeclarePagesRequest;
  ExpectRefusals<R, v1::DeclarePagesReply>(
      engine_, engine_.PagesRequest(), absl::StatusCode::kInvalidArgument,
      {
          {"model: unknown handle", [](R& r) { r.set_model(999); }},
          {"region: unknown handle", [](R& r) { r.set_region(999); }},
          {"page_tokens", [](R& r) { r.set_page_tokens(0); }},
          {"page_tokens", [](R& r) { r.set_page_tokens(1 << 20); }},
          {"pages: out of range; expected 1 to", [](R& r) { r.set_pages(0); }},
          {"pages: out of range; expected 1 to", [](R& r) { r.set_pages(0xffffffff); }},
          {"layers: attention layer 1 is missing", [](R& r) { r.clear_layers(); }},
          {"layers[1]: the layout has only 1", [](R& r) { *r.add_layers() = r.layers(0); }},
          {"layers[0].layer: 0; expected attention layer 1", [](R& r) { r.mutable_layers(0)->set_layer(0); }},
          {"layers[0].key_offset: must be aligned", [](R& r) { r.mutable_layers(0)->set_key_offset(2); }},
          {"layers[0].page_stride: must be aligned", [](R& r) { r.mutable_layers(0)->set_page_stride(449); }},
          {"layers[0].token_stride: must be aligned", [](R& r) { r.mutable_layers(0)->set_token_stride(113); }},
          {"layers[0].value_head_stride: must be aligned",
           [](R& r) { r.mutable_layers(0)->set_value_head_stride(25); }},
          {"layers[0].key_offset: the last page exceeds",
           [](R& r) { r.mutable_layers(0)->set_key_offset(TestEngine::kRegionBytes); }},
          {"layers[0].value_offset: the last page exceeds",
           [](R& r) { r.mutable_layers(0)->set_value_offset(~uint64_t{3}); }},
          {"layers[0].key_offset: the last page exceeds",
           [](R& r) { r.mutable_layers(0)->set_page_stride(~uint64_t{3}); }},
          {"layers[0].key_offset: the last page exceeds", [](R& r) { r.set_pages(0x7fffffff); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_key_head_stride(0); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_token_stride(16); }},
          {"layers[0].key_head_stride: rows overlap", [](R& r) { r.mutable_layers(0)->set_page_stride(0); }},
      });
}

TEST_F(EngineRefusalTest, MalformedMatchIsRefusedByName) {
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(engine_.model());
  for (int i = 0; i < 3; ++i) {
    match.add_prompts()->set_tokens(PackTokens(Ascending(20, i)));
    for (int j = 0; j < 6; ++j) match.mutable_prompts(i)->add_segment_lengths(3);
  }
  using M = v1::MatchRequest;
  ExpectRefusals<M, v1::MatchReply>(
      engine_, match, absl::StatusCode::kInvalidArgument,
      {
          {"model: unknown handle", [](M& r) { r.set_model(999); }},
          {"prompts[2].segment_lengths[5]: 0; expected", [](M& r) { r.mutable_prompts(2)->set_segment_lengths(5, 0); }},
          {"prompts[2].segment_lengths[5]: exceeds the tokens left",
           [](M& r) { r.mutable_prompts(2)->set_segment_lengths(5, 6); }},
          {"prompts[1].segment_lengths[1]: exceeds the tokens left",
           [](M& r) { r.mutable_prompts(1)->set_segment_lengths(1, ~uint64_t{0}); }},
          {"prompts[0].tokens: length is not a multiple of 4 bytes",
           [](M& r) { r.mutable_prompts(0)->mutable_tokens()->append("x"); }},
          {"prompts[0].tokens: too many; expected at most",
           [](M& r) { r.mutable_prompts(0)->set_tokens(std::string((limits::kMaxPromptTokens + 1) * 4, 'x')); }},
          {"prompts[0].segment_lengths: too many; expected at most",
           [](M& r) { r.mutable_prompts(0)->mutable_segment_lengths()->Resize(limits::kMaxSegments + 1, 1); }},
          {"prompts: too many; expected at most",
           [](M& r) {
             for (uint64_t i = 0; i < limits::kMaxPromptsPerCall; ++i) r.add_prompts();
           }},
          {"prompts[1].needed_in_ns", [](M& r) { r.mutable_prompts(1)->set_needed_in_ns(-1); }},
          {"prompts[1].needed_in_ns",
           [](M& r) { r.mutable_prompts(1)->set_needed_in_ns(limits::kMaxNeededInNanos + 1); }},
          {"prompts: 65554 shards of segments together; expected at most 65536",
           [](M& r) {
             for (uint64_t i = 0; i < limits::kMaxLookupsPerMatch; i += limits::kMaxSegments) {
               r.add_prompts()->mutable_segment_lengths()->Resize(limits::kMaxSegments, 1);
             }
           }},
      });
}

TEST_F(EngineRefusalTest, MalformedReserveIsRefusedByName) {
  auto reserve = engine_.Make<v1::ReserveRequest>();
  reserve.set_model(engine_.model());
  reserve.add_objects()->set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
  reserve.mutable_objects(0)->set_tokens(PackTokens(Ascending(20, 0)));
  using V = v1::ReserveRequest;
  ExpectRefusals<V, v1::ReserveReply>(
      engine_, reserve, absl::StatusCode::kInvalidArgument,
      {
          {"model: unknown handle", [](V& r) { r.set_model(999); }},
          {"objects[0].kind", [](V& r) { r.mutable_objects(0)->set_kind(2); }},
          {"objects[0].kind", [](V& r) { r.mutable_objects(0)->set_kind(257); }},
          {"objects[0].tokens: empty", [](V& r) { r.mutable_objects(0)->clear_tokens(); }},
          {"objects[0].tokens: length is not a multiple of 4 bytes",
           [](V& r) { r.mutable_objects(0)->set_tokens("abc"); }},
          {"objects: too many; expected at most",
           [](V& r) {
             for (uint64_t i = 0; i < limits::kMaxObjectsPerCall; ++i) r.add_objects();
           }},
      });
}

TEST_F(EngineRefusalTest, MalformedPublishAbandonAndReleaseAreRefusedByName) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  auto publish = engine_.Make<v1::PublishRequest>();
  *publish.add_objects() = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  using P = v1::PublishRequest;
  ExpectRefusals<P, v1::PublishReply>(
      engine_, publish, absl::StatusCode::kInvalidArgument,
      {
          {"objects[0].provenance: 0 is unknown; expected 1 (exact)",
           [](P& r) { r.mutable_objects(0)->set_provenance(0); }},
          {"objects[0].provenance: composed", [](P& r) { r.mutable_objects(0)->set_provenance(2); }},
          {"objects[0].first_position", [](P& r) { r.mutable_objects(0)->set_first_position(~uint64_t{0}); }},
          {"objects[0].parts[0].form", [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_form(4); }},
          {"objects[0].parts[0].form", [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_form(258); }},
          {"objects[0].parts[1].heads: must be 0; only transitions",
           [](P& r) { r.mutable_objects(0)->mutable_parts(1)->set_heads(1); }},
          {"objects[0].parts[0].first_head: must be 0 without heads",
           [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_first_head(1); }},
          {"objects[0].parts[0].rank: must be 0 without heads",
           [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_rank(1); }},
          {"objects[0].parts[0].heads: required", [](P& r) { r.mutable_objects(0)->mutable_parts(0)->set_form(12); }},
          {"objects[0].parts[0].region: must be 0 for zero transitions",
           [](P& r) {
             r.mutable_objects(0)->mutable_parts(0)->set_form(12);
             r.mutable_objects(0)->mutable_parts(0)->set_heads(2);
           }},
          {"objects[0].parts[3]: the same part",
           [](P& r) { *r.mutable_objects(0)->add_parts() = r.objects(0).parts(0); }},
          {"objects[0].page_table: too many; expected at most",
           [](P& r) { r.mutable_objects(0)->mutable_page_table()->Resize(limits::kMaxPromptTokens + 1, 0); }},
          {"deadline_ns", [](P& r) { r.set_deadline_ns(-1); }},
          {"objects: too many; expected at most",
           [](P& r) {
             for (uint64_t i = 0; i < limits::kMaxObjectsPerCall; ++i) *r.add_objects() = r.objects(0);
           }},
      });

  auto abandon = engine_.Make<v1::AbandonRequest>();
  abandon.mutable_reservations()->Resize(limits::kMaxObjectsPerCall, 0);  // unknown ones are ignored
  ExpectRefusals<v1::AbandonRequest, v1::AbandonReply>(
      engine_, abandon, absl::StatusCode::kInvalidArgument,
      {{"reservations: too many; expected at most",
        [&](v1::AbandonRequest& r) { r.add_reservations(reserved.reservation()); }}});
  auto release = engine_.Make<v1::ReleaseRequest>();
  release.add_leases(std::string(16, 'x'));
  ExpectRefusals<v1::ReleaseRequest, v1::ReleaseReply>(
      engine_, release, absl::StatusCode::kInvalidArgument,
      {{"leases: too many; expected at most", [](v1::ReleaseRequest& r) {
          for (uint64_t i = 0; i < limits::kMaxReleasesPerCall; ++i) *r.add_leases() = r.leases(0);
        }}});
  // None of these calls used up the reservation.
  EXPECT_EQ(engine_.Publish(publish.objects(0)), PublishOutcome::kPublished);
}

// Forms that a segment's transitions cannot have: two dense heads of 8 × 8.
TEST_F(EngineRefusalTest, InvalidFormsAreRefusedByName) {
  const std::vector<int32_t> tokens = Ascending(24, 7);
  const v1::ReserveResult reserved = engine_.Reserve(ObjectKind::kSegment, tokens);
  auto publish = engine_.Make<v1::PublishRequest>();
  *publish.add_objects() = engine_.Sources(ObjectKind::kSegment, reserved.reservation(), tokens.size());
  using P = v1::PublishRequest;
  using S = v1::PartSource;
  const auto first = [](std::function<void(S&)> change) {
    return [change](P& r) {
      S* part = r.mutable_objects(0)->mutable_parts(0);
      part->set_heads(2);
      change(*part);
    };
  };
  ExpectRefusals<P, v1::PublishReply>(
      engine_, publish, absl::StatusCode::kInvalidArgument,
      {
          {"objects[0].parts[0].layer: 1 has no transitions", first([](S& part) { part.set_layer(1); })},
          {"objects[0].parts[0].layer: 9 has no transitions", first([](S& part) { part.set_layer(9); })},
          {"objects[0].parts[0].first_head: 2 is out of range; the layer has 2 heads",
           first([](S& part) { part.set_first_head(2); })},
          {"objects[0].parts[0].heads: first_head + heads is 0 + 3", first([](S& part) { part.set_heads(3); })},
          {"objects[0].parts[0].heads: first_head + heads is 1 + 4294967295",
           first([](S& part) { part.set_first_head(1), part.set_heads(~uint32_t{0}); })},
          {"objects[0].parts: layer 0: head 1 has no transition", first([](S& part) { part.set_heads(1); })},
          {"objects[0].parts: layer 0: head 0 has no transition",
           first([](S& part) { part.set_first_head(1), part.set_heads(1); })},
          {"objects[0].parts: layer 0: head 1 has two transitions",
           [&](P& r) {
             first([](S&) {})(r);
             S* zero = r.mutable_objects(0)->add_parts();
             zero->set_form(12), zero->set_first_head(1), zero->set_heads(1);
           }},
          {"objects[0].parts[0].rank: must be 0; only low rank", first([](S& part) { part.set_rank(1); })},
          {"objects[0].parts[0].rank: must be at least 1", first([](S& part) { part.set_form(11); })},
          {"objects[0].parts[0].rank: 4 takes as many bytes",
           first([](S& part) { part.set_form(11), part.set_rank(4); })},
          {"objects[0].parts[0].rank: 9 takes as many bytes",
           first([](S& part) { part.set_form(11), part.set_rank(9); })},
          {"objects[0].parts[0].form: 8 does not match", first([](S& part) { part.set_form(8); })},
      });
  // None of these calls used up the reservation.
  EXPECT_EQ(engine_.Publish(publish.objects(0)), PublishOutcome::kPublished);
}

}  // namespace
}  // namespace ashlar::daemon
