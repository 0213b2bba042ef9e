// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/match_reply.h"

#include <gtest/gtest.h>

#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

constexpr uint32_t kHit = static_cast<uint32_t>(MissReason::kNone);
constexpr uint32_t kBusy = static_cast<uint32_t>(MissReason::kBusy);

// An object of 100 tokens in `runs` runs. All fields of a run have their longest encoding.
struct Object {
  explicit Object(size_t runs, ObjectKind kind = ObjectKind::kCheckpoint) {
    header.kind = kind;
    header.tokens = 100;
    header.bytes = uint64_t{1} << 40;
    for (size_t i = 0; i < runs; ++i)
      slot.runs.push_back({.arena = UINT32_MAX, .first = UINT32_MAX, .count = UINT32_MAX});
  }
  storage::Found Hit() const {
    return {.reason = MissReason::kNone, .tier = TierKind::kDram, .header = &header, .slot = &slot};
  }

  ObjectHeader header;
  storage::Slot slot;
};

storage::Match MatchOf(std::vector<storage::Found> found) {
  storage::Match match;
  match.lease.fill(7);
  match.found = std::move(found);
  return match;
}

// As in the service.
void WriteWhole(const storage::Match& match, v1::PromptMatch* out) {
  storage::Slice whole;
  size_t written = 0;
  ASSERT_TRUE(MatchReplyWriter::Write(match, written, whole, out));
}

void Write(MatchReplyWriter& writer, storage::Match match, v1::PromptMatch* out) {
  for (storage::Found& found : match.found) {
    if (found.reason == MissReason::kNone && !writer.Take(found)) found = {.reason = MissReason::kBusy};
  }
  WriteWhole(match, out);
}

size_t BytesOf(const Object& object) {
  v1::PromptMatch out;
  WriteWhole(MatchOf({object.Hit()}), &out);
  return out.segments(0).ByteSizeLong();
}

TEST(MatchReply, ListsEveryRunOfAHit) {
  Object object(2);
  object.slot.runs[1] = {.arena = 3, .first = 4, .count = 5};
  v1::PromptMatch out;
  WriteWhole(MatchOf({object.Hit(), {.reason = MissReason::kEvicted}}), &out);
  EXPECT_EQ(out.lease(), std::string(16, '\7'));
  EXPECT_EQ(out.prefix_depth(), 100u);
  ASSERT_EQ(out.segments_size(), 2);
  EXPECT_EQ(out.segments(0).kind(), static_cast<uint32_t>(ObjectKind::kCheckpoint));
  EXPECT_EQ(out.segments(0).tier(), static_cast<uint32_t>(TierKind::kDram));
  EXPECT_EQ(out.segments(0).bytes(), object.header.bytes);
  ASSERT_EQ(out.segments(0).extents_size(), 2);
  EXPECT_EQ(out.segments(0).extents(1).arena(), 3u);
  EXPECT_EQ(out.segments(0).extents(1).first(), 4u);
  EXPECT_EQ(out.segments(0).extents(1).count(), 5u);
  EXPECT_EQ(out.segments(1).miss_reason(), static_cast<uint32_t>(MissReason::kEvicted));
  EXPECT_EQ(out.segments(1).kind(), static_cast<uint32_t>(ObjectKind::kSegment));
}

TEST(MatchReply, HitsBeyondTheBudgetAreBusy) {
  const Object scattered(100), small(1);
  MatchReplyWriter writer(BytesOf(scattered) * 5 / 2);
  v1::PromptMatch first, second;
  Write(writer,
        MatchOf({scattered.Hit(), scattered.Hit(), scattered.Hit(), small.Hit(), {.reason = MissReason::kEvicted}}),
        &first);
  Write(writer, MatchOf({small.Hit()}), &second);

  const std::vector<uint32_t> reasons = {kHit, kHit, kBusy, kBusy, static_cast<uint32_t>(MissReason::kEvicted)};
  ASSERT_EQ(first.segments_size(), 5);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(first.segments(i).miss_reason(), reasons[i]) << i;
    EXPECT_EQ(first.segments(i).extents_size(), reasons[i] == kHit ? 100 : 0) << i;
    EXPECT_EQ(first.segments(i).bytes(), reasons[i] == kHit ? scattered.header.bytes : 0) << i;
  }
  EXPECT_EQ(first.prefix_depth(), 100u);
  // The lease is named, so that it can be released.
  EXPECT_EQ(second.lease(), std::string(16, '\7'));
  EXPECT_EQ(second.segments(0).miss_reason(), kBusy);
  EXPECT_EQ(second.prefix_depth(), 0u);
}

TEST(MatchReply, NamesAPrefixsObjects) {
  const Object block(2, ObjectKind::kPrefixBlock), checkpoint(1), span(3, ObjectKind::kSpan);
  storage::Match match = MatchOf({{.reason = MissReason::kCovered}, block.Hit(), checkpoint.Hit(), span.Hit()});
  match.prefix = {{.depth = 300,
                   .own = true,
                   .provenance = Provenance::kComposed,
                   .span_tokens = 20,
                   .objects = {.begin = 1, .blocks = 1, .checkpoint = 2, .span = 3}},
                  {},
                  {400}};
  for (uint64_t depth = 201; depth <= 300; ++depth) match.prefix.resumable.push_back(depth);
  v1::PromptMatch out;
  WriteWhole(match, &out);
  EXPECT_EQ(out.prefix_depth(), 300u);
  EXPECT_EQ(out.checkpoint_positions(0), 400u);
  ASSERT_EQ(out.segments_size(), 1);
  EXPECT_EQ(out.segments(0).miss_reason(), static_cast<uint32_t>(MissReason::kCovered));
  const v1::PrefixMatch& prefix = out.prefix();
  EXPECT_EQ(prefix.depth(), 300u);
  EXPECT_TRUE(prefix.own());
  EXPECT_EQ(prefix.provenance(), static_cast<uint32_t>(Provenance::kComposed));
  ASSERT_EQ(prefix.blocks_size(), 1);
  EXPECT_EQ(prefix.blocks(0).kind(), static_cast<uint32_t>(ObjectKind::kPrefixBlock));
  EXPECT_EQ(prefix.blocks(0).extents_size(), 2);
  EXPECT_EQ(prefix.blocks(0).object(), 1u);
  EXPECT_EQ(prefix.checkpoint().kind(), static_cast<uint32_t>(ObjectKind::kCheckpoint));
  EXPECT_EQ(prefix.checkpoint().object(), 2u);
  EXPECT_EQ(prefix.span_tokens(), 20u);
  EXPECT_EQ(prefix.span().extents_size(), 3);
  EXPECT_EQ(prefix.span().object(), 3u);
  ASSERT_EQ(prefix.resumable_size(), 64) << "the deepest";
  EXPECT_EQ(prefix.resumable(0), 237u);
  EXPECT_EQ(prefix.resumable(63), 300u);

  // For a reader that cannot use all of it, it is a miss.
  match.found[1] = {.reason = MissReason::kInvalidRequest};
  out.Clear();
  WriteWhole(match, &out);
  EXPECT_FALSE(out.has_prefix());
  EXPECT_EQ(out.prefix_depth(), 0u);
  EXPECT_EQ(out.segments_size(), 1);
}

// The largest number of prompts and segments of a call, all of them hits of one scattered object.
TEST(MatchReply, TheLargestReplyFitsAMessage) {
  const Object scattered(600, ObjectKind::kSegment);
  constexpr uint32_t kSegments = limits::kMaxLookupsPerMatch / limits::kMaxPromptsPerCall;
  storage::Match all_hit = MatchOf(std::vector<storage::Found>(kSegments, scattered.Hit()));
  all_hit.prefix = {{.depth = limits::kMaxPromptTokens,
                     .own = true,
                     .objects = {.begin = kSegments / 2, .blocks = kSegments / 2 - 1, .checkpoint = kSegments - 1}}};
  all_hit.prefix.resumable.assign(1000, limits::kMaxPromptTokens);
  all_hit.prefix.checkpoint_at.assign(1000, limits::kMaxPromptTokens);
  MatchReplyWriter writer;
  v1::MatchReply reply;
  for (uint64_t i = 0; i < limits::kMaxPromptsPerCall; ++i) {
    v1::PromptMatch* out = reply.add_prompts();
    Write(writer, all_hit, out);
  }
  EXPECT_LE(reply.ByteSizeLong(), limits::kMaxReplyBytes);
  EXPECT_GE(reply.ByteSizeLong(), limits::kMaxReplyBytes / 4 * 3) << "the whole reply is used";
  EXPECT_EQ(reply.prompts(0).segments(0).miss_reason(), kHit);
  EXPECT_EQ(reply.prompts(reply.prompts_size() - 1).segments(0).miss_reason(), kBusy);
}

}  // namespace
}  // namespace ashlar::daemon
