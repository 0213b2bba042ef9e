// SPDX-License-Identifier: Apache-2.0
// Multimodal inputs over gRPC: the same tokens with another image are another text.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/key.h"
#include "proto/limits.h"
#include "proto/outcome.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

MediaHash Image(uint64_t offset, uint8_t content) {
  MediaHash image{.offset = offset};
  image.hash.fill(content);
  return image;
}

class EngineMediaTest : public ::testing::Test {
 protected:
  using Media = std::vector<MediaHash>;

  v1::PromptMatch Match(const std::vector<int32_t>& tokens, const std::vector<uint64_t>& lengths, const Media& media,
                        uint64_t model = 0) {
    auto request = engine_.Make<v1::MatchRequest>();
    request.set_model(model == 0 ? engine_.model() : model);
    v1::Prompt& prompt = *request.add_prompts();
    prompt.set_tokens(PackTokens(tokens));
    prompt.mutable_segment_lengths()->Assign(lengths.begin(), lengths.end());
    prompt.set_media(PackMedia(media));
    v1::MatchReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply.prompts_size() == 1 ? reply.prompts(0) : v1::PromptMatch();
  }
  v1::ReserveRequest ReserveRequest(ObjectKind kind, const std::vector<int32_t>& run, const Media& media) {
    auto request = engine_.Make<v1::ReserveRequest>();
    request.set_model(engine_.model());
    v1::ObjectName& name = *request.add_objects();
    name.set_kind(static_cast<uint32_t>(kind));
    name.set_tokens(PackTokens(run));
    name.set_media(PackMedia(media));
    return request;
  }
  PublishOutcome Publish(ObjectKind kind, const std::vector<int32_t>& run, const Media& media) {
    v1::ReserveReply reply;
    const absl::Status status = engine_.Call(ReserveRequest(kind, run, media), &reply);
    EXPECT_TRUE(status.ok()) << status;
    if (reply.results_size() != 1) return PublishOutcome::kUnavailable;
    return engine_.Publish(engine_.Sources(kind, reply.results(0).reservation(), run.size()));
  }

  TestNode node_;
  TestEngine engine_{node_};
};

bool IsHit(const v1::SegmentMatch& segment) {
  return segment.miss_reason() == 0;
}

TEST_F(EngineMediaTest, OnlyTheSameImageAtTheSameTokenHits) {
  const std::vector<int32_t> first = Ascending(20, 1), second = Ascending(40, 100);
  ASSERT_EQ(Publish(ObjectKind::kCheckpoint, first, {Image(3, 1)}), PublishOutcome::kPublished);
  ASSERT_EQ(Publish(ObjectKind::kSegment, second, {Image(0, 2), Image(39, 3)}), PublishOutcome::kPublished);
  std::vector<int32_t> prompt = first;
  prompt.insert(prompt.end(), second.begin(), second.end());
  prompt.push_back(7);
  const struct {
    const char* name;
    Media media;
    bool first, second;
  } kCases[] = {
      {"the same", {Image(3, 1), Image(20, 2), Image(59, 3)}, true, true},
      {"another behind the segments", {Image(3, 1), Image(20, 2), Image(59, 3), Image(60, 4)}, true, true},
      {"none", {}, false, false},
      {"another in the first", {Image(3, 9), Image(20, 2), Image(59, 3)}, false, true},
      {"another in the second", {Image(3, 1), Image(20, 2), Image(59, 9)}, true, false},
      {"at another token", {Image(2, 1), Image(21, 2), Image(59, 3)}, false, false},
      {"one is missing", {Image(3, 1), Image(20, 2)}, true, false},
      {"one too many", {Image(3, 1), Image(19, 5), Image(20, 2), Image(59, 3)}, false, true},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const v1::PromptMatch match = Match(prompt, {first.size(), second.size()}, c.media);
    ASSERT_EQ(match.segments_size(), 2);
    EXPECT_EQ(IsHit(match.segments(0)), c.first);
    EXPECT_EQ(IsHit(match.segments(1)), c.second);
  }
}

// Absent media change no key.
TEST_F(EngineMediaTest, TextsWithoutMediaKeepTheirKeys) {
  const std::vector<int32_t> run = Ascending(30, 5);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, run), PublishOutcome::kPublished);
  std::vector<int32_t> prompt = run;
  prompt.push_back(7);
  EXPECT_TRUE(IsHit(Match(prompt, {run.size()}, {}).segments(0)));
  EXPECT_TRUE(IsHit(Match(prompt, {run.size()}, {Image(30, 1)}).segments(0))) << "behind the segment";
  EXPECT_FALSE(IsHit(Match(prompt, {run.size()}, {Image(29, 1)}).segments(0)));
}

TEST_F(EngineMediaTest, PrefixesDependOnTheirImages) {
  const TestEngine::Opened opened = engine_.OpenWithPrefixes();
  const std::vector<int32_t> text = Ascending(40, 7), prompt = Ascending(50, 7);
  v1::CommitRequest commit = engine_.CommitRequest(opened, text);
  commit.set_media(PackMedia(Media{Image(10, 1)}));
  v1::CommitReply reply;
  const absl::Status status = engine_.Call(commit, &reply);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(reply.outcomes(0), static_cast<uint32_t>(CommitOutcome::kKept));
  EXPECT_EQ(Match(prompt, {}, {Image(10, 1)}, opened.model).prefix().depth(), 40u);
  EXPECT_EQ(Match(prompt, {}, {Image(10, 1), Image(40, 2)}, opened.model).prefix().depth(), 40u);
  EXPECT_EQ(Match(prompt, {}, {Image(10, 1), Image(39, 2)}, opened.model).prefix().depth(), 0u);
  EXPECT_EQ(Match(prompt, {}, {Image(10, 2)}, opened.model).prefix().depth(), 0u);
  EXPECT_EQ(Match(prompt, {}, {Image(11, 1)}, opened.model).prefix().depth(), 0u);
  EXPECT_EQ(Match(prompt, {}, {}, opened.model).prefix().depth(), 0u);
}

// An image counts fewer rotary positions than tokens, so the keys of a segment after it are rotated by less than their
// position in the pages.
TEST_F(EngineMediaTest, KeysRotateByTheirRotaryPosition) {
  engine_.FillMemory();
  const std::vector<int32_t> first = Ascending(20, 1), run = Ascending(40, 100);
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, run), PublishOutcome::kPublished);
  std::vector<int32_t> prompt = first;
  prompt.insert(prompt.end(), run.begin(), run.end());
  const auto match = engine_.Match(prompt, {first.size(), run.size()});
  ASSERT_TRUE(match.ok() && IsHit(match->segments(1))) << match.status();
  const uint32_t page_tokens = engine_.PagesRequest().page_tokens();
  const auto key = [&](uint64_t position) {
    return *engine_.Key(static_cast<int32_t>(position / page_tokens), position % page_tokens, 1);
  };
  // Keys of one token in the interior, landed at slot `position` and rotated by `position` + `shift`.
  const auto landed = [&](uint64_t position, int64_t shift) {
    v1::LandSegment segment = At(1, position);
    segment.set_rotary_shift(shift);
    const auto verdict = engine_.Land(engine_.LandRequest(match->lease(), {segment}));
    EXPECT_TRUE(verdict.ok()) << verdict.status();
    return key(position + run.size() / 2);
  };
  const float straight = landed(20, 0), here = landed(27, 0);
  EXPECT_NE(straight, here);
  EXPECT_EQ(landed(20, 7), here);
  EXPECT_EQ(landed(27, -7), straight);
  EXPECT_EQ(landed(27, -27), landed(0, 0));
  for (const int64_t shift : {int64_t{-28}, INT64_MAX, INT64_MIN}) {
    v1::LandSegment segment = At(1, 27);
    segment.set_rotary_shift(shift);
    const auto verdict = engine_.Land(engine_.LandRequest(match->lease(), {segment}));
    EXPECT_EQ(verdict.status().message(),
              "segments[0].rotary_shift: out of range; first_position + rotary_shift must be 0 to 1099511627776");
  }
}

TEST_F(EngineMediaTest, MalformedMediaAreRefusedByName) {
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(engine_.model());
  match.add_prompts()->set_tokens(PackTokens(Ascending(20, 1)));
  using M = v1::MatchRequest;
  const auto put = [](const Media& media) {
    return [media](M& r) { r.mutable_prompts(0)->set_media(PackMedia(media)); };
  };
  ExpectRefusals<M, v1::MatchReply>(
      engine_, match, absl::StatusCode::kInvalidArgument,
      {
          {"prompts[0].media: length is not a multiple of 40 bytes",
           [](M& r) { r.mutable_prompts(0)->set_media("x"); }},
          {"prompts[0].media: too many; expected at most", put(Media(limits::kMaxMedia + 1))},
          {"prompts[0].media[1].offset: must be greater than the previous offset", put({Image(3, 1), Image(3, 2)})},
          {"prompts[0].media[0].offset: must be less than the number of tokens", put({Image(20, 1)})},
      });
  using R = v1::ReserveRequest;
  ExpectRefusals<R, v1::ReserveReply>(
      engine_, ReserveRequest(ObjectKind::kSegment, Ascending(20, 1), {}), absl::StatusCode::kInvalidArgument,
      {{"objects[0].media[0].offset: must be less than the number of tokens",
        [](R& r) { r.mutable_objects(0)->set_media(PackMedia(Media{Image(20, 1)})); }}});
  using C = v1::CommitRequest;
  ExpectRefusals<C, v1::CommitReply>(engine_, engine_.CommitRequest(engine_.OpenWithPrefixes(), Ascending(20, 1)),
                                     absl::StatusCode::kInvalidArgument,
                                     {{"media[0].offset: must be less than the number of tokens",
                                       [](C& r) { r.set_media(PackMedia(Media{Image(20, 1)})); }}});
}

}  // namespace
}  // namespace ashlar::daemon
