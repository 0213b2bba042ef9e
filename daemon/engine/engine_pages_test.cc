// SPDX-License-Identifier: Apache-2.0
// In-place sharing through a daemon: pages of a hosted region that requests reference, by lease.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint32_t kPages = TestEngine::kPages;

Layout WithStored(StoredKeys stored) {
  Layout layout = SmallLayout();  // pages of 4, head 4, tail 2
  std::get<AttentionLayer>(layout.layers[1]).stored = stored;
  return layout;
}

// An engine with pages in a hosted region, allocated by the daemon.
struct SharingEngine {
  explicit SharingEngine(const TestNode& node, StoredKeys stored = StoredKeys::kUnrotated)
      : engine(node, WithStored(stored)), hosted(Host(TestEngine::kRegionBytes)) {
    EXPECT_TRUE(Declare().ok());
  }

  uint64_t Host(uint64_t bytes, UniqueFd* memory = nullptr) {
    v1::SessionRequest request;
    request.mutable_host_region()->set_bytes(bytes);
    UniqueFd mine;
    const auto reply = engine.socket().Ask(request, {}, memory == nullptr ? &mine : memory);
    EXPECT_TRUE(StatusOf(reply).ok()) << StatusOf(reply);
    return reply->region().region();
  }

  v1::DeclarePagesRequest PagesRequest() const {
    v1::DeclarePagesRequest request = engine.PagesRequest();
    request.set_region(hosted);
    request.set_allocate(true);
    return request;
  }
  absl::Status Declare() {
    v1::DeclarePagesReply reply;
    const absl::Status status = engine.Call(PagesRequest(), &reply);
    if (status.ok()) pages = reply.pages_id();
    return status;
  }

  // A first segment of 6 tokens and two of 15: 2, 3 and 3 shared pages.
  v1::AdmitRequest Request(char lease, uint32_t own_pages) const {
    auto request = engine.Make<v1::AdmitRequest>();
    request.set_pages_id(pages);
    request.set_lease(std::string(16, lease));
    request.mutable_prompt()->set_tokens(PackTokens(Ascending(40, 1)));
    for (const uint64_t length : {6, 15, 15}) request.mutable_prompt()->add_segment_lengths(length);
    request.set_own_pages(own_pages);
    return request;
  }
  absl::StatusOr<v1::AdmitReply> Admit(const v1::AdmitRequest& request) {
    v1::AdmitReply reply;
    if (absl::Status status = engine.Call(request, &reply); !status.ok()) return status;
    return reply;
  }
  absl::StatusOr<v1::AdmitReply> Admit(char lease, uint32_t own_pages) { return Admit(Request(lease, own_pages)); }
  absl::Status MarkFilled(char lease, std::vector<uint32_t> segments) {
    auto request = engine.Make<v1::MarkFilledRequest>();
    request.set_lease(std::string(16, lease));
    request.mutable_segments()->Add(segments.begin(), segments.end());
    v1::MarkFilledReply reply;
    return engine.Call(request, &reply);
  }
  absl::StatusOr<v1::AdmitReply> Extend(char lease, uint32_t own_pages) {
    auto request = engine.Make<v1::ExtendAdmissionRequest>();
    request.set_lease(std::string(16, lease));
    request.set_own_pages(own_pages);
    v1::AdmitReply reply;
    if (absl::Status status = engine.Call(request, &reply); !status.ok()) return status;
    return reply;
  }
  absl::StatusOr<v1::AdmitReply> Attach(char lease, std::optional<std::vector<uint32_t>> to_fill = std::nullopt) {
    auto request = engine.Make<v1::AttachAdmissionRequest>();
    request.set_lease(std::string(16, lease));
    if (to_fill.has_value()) request.mutable_to_fill()->mutable_segments()->Add(to_fill->begin(), to_fill->end());
    v1::AdmitReply reply;
    if (absl::Status status = engine.Call(request, &reply); !status.ok()) return status;
    return reply;
  }
  void Release(char lease) {
    auto request = engine.Make<v1::ReleaseRequest>();
    request.add_leases(std::string(16, lease));
    v1::ReleaseReply reply;
    EXPECT_TRUE(engine.Call(request, &reply).ok());
  }

  TestEngine engine;
  uint64_t hosted = 0, pages = 0;
};

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}
std::vector<int32_t> PagesOf(const absl::StatusOr<v1::AdmitReply>& reply, int segment) {
  const auto& pages = reply->admission().segments(segment).pages();
  return {pages.begin(), pages.end()};
}
std::vector<PageContent> Contents(const absl::StatusOr<v1::AdmitReply>& reply) {
  std::vector<PageContent> contents;
  for (const auto& segment : reply->admission().segments()) {
    contents.push_back(static_cast<PageContent>(segment.content()));
  }
  return contents;
}

TEST(EnginePages, RequestsShareSegmentsInPlace) {
  TestNode node;
  SharingEngine engine(node);
  const auto first = engine.Admit('a', 5);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(first->has_admission());
  EXPECT_EQ(PagesOf(first, 0).size(), 2u);
  EXPECT_EQ(PagesOf(first, 1).size(), 3u);  // tokens 4 … 12 of 15, padded by one in front: slots 5 … 13
  EXPECT_EQ(first->admission().own_pages_size(), 5);
  EXPECT_THAT(Contents(first), ElementsAre(PageContent::kToFill, PageContent::kToFill, PageContent::kToFill));
  ASSERT_TRUE(engine.MarkFilled('a', {0, 2}).ok());

  const auto second = engine.Admit('b', 5);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(Contents(second), ElementsAre(PageContent::kFilled, PageContent::kBeingFilled, PageContent::kFilled));
  for (int segment = 0; segment < 3; ++segment) EXPECT_EQ(PagesOf(second, segment), PagesOf(first, segment));
  EXPECT_THAT(Message(engine.MarkFilled('b', {2, 1})), StartsWith("segments[1]: is being filled by another request"));

  engine.Release('a');
  const auto now = engine.Attach('b');
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_THAT(Contents(now), ElementsAre(PageContent::kFilled, PageContent::kToFill, PageContent::kFilled));
  EXPECT_TRUE(engine.MarkFilled('b', {1}).ok());
}

// A text's prefix ignores segments: its contents differ from what shared pages must hold.
TEST(EnginePages, APrefixLandsOnlyOnOwnPages) {
  TestNode node;
  SharingEngine engine(node);
  const TestEngine::Opened prefixes = engine.engine.OpenWithPrefixes();
  v1::CommitReply committed;
  ASSERT_TRUE(engine.engine.Call(engine.engine.CommitRequest(prefixes, Ascending(20, 1)), &committed).ok());
  ASSERT_EQ(committed.outcomes(0), static_cast<uint32_t>(CommitOutcome::kKept));
  auto match = engine.engine.Make<v1::MatchRequest>();
  match.set_model(prefixes.model);
  match.add_prompts()->set_tokens(PackTokens(Ascending(40, 1)));
  v1::MatchReply found;
  ASSERT_TRUE(engine.engine.Call(match, &found).ok());
  ASSERT_EQ(found.prompts(0).prefix().depth(), 20u);

  const auto admitted = engine.Admit('a', 5);
  const auto land = [&](const std::vector<int32_t>& table) {
    v1::LandRequest request = engine.engine.LandRequest(found.prompts(0).lease(), {At(0, 0)});
    request.set_pages_id(engine.pages);
    request.mutable_page_table()->Assign(table.begin(), table.end());
    return engine.engine.Land(request);
  };
  const auto& own = admitted->admission().own_pages();
  std::vector<int32_t> table(own.begin(), own.end());
  const auto landed = land(table);
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_THAT(*landed, ElementsAre(MissReason::kNone));
  table[1] = PagesOf(admitted, 0)[1];
  EXPECT_THAT(Message(land(table).status()), HasSubstr("is shared; a prefix must land on the request's own pages"));
}

TEST(EnginePages, RequestsShareTheBlocksOfAPrefix) {
  TestNode node;
  SharingEngine engine(node);
  const TestEngine::Opened prefixes = engine.engine.OpenWithPrefixes();
  v1::CommitReply committed;
  ASSERT_TRUE(engine.engine.Call(engine.engine.CommitRequest(prefixes, Ascending(256, 1)), &committed).ok());
  auto match = engine.engine.Make<v1::MatchRequest>();
  match.set_model(prefixes.model);
  match.add_prompts()->set_tokens(PackTokens(Ascending(260, 1)));
  v1::MatchReply found;
  ASSERT_TRUE(engine.engine.Call(match, &found).ok());
  ASSERT_EQ(found.prompts(0).prefix().blocks_size(), 1);
  v1::DeclarePagesRequest declaring = engine.PagesRequest();
  declaring.set_model(prefixes.model);
  v1::DeclarePagesReply declared;
  ASSERT_TRUE(engine.engine.Call(declaring, &declared).ok());

  // A block of 256 tokens takes all pages.
  const auto ask = [&](char lease, std::vector<int32_t> tokens) {
    v1::AdmitRequest request = engine.Request(lease, 0);
    request.set_pages_id(declared.pages_id());
    request.mutable_prompt()->clear_segment_lengths();
    request.mutable_prompt()->set_tokens(PackTokens(tokens));
    request.set_prefix_blocks(1);
    return request;
  };
  std::vector<int32_t> tokens = Ascending(260, 1);
  const auto first = engine.Admit(ask('a', tokens));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(Contents(first), ElementsAre(PageContent::kToFill));
  ASSERT_EQ(PagesOf(first, 0).size(), kPages);

  const auto land = [&](const std::vector<int32_t>& table) {
    v1::LandRequest request =
        engine.engine.LandRequest(found.prompts(0).lease(), {At(found.prompts(0).prefix().blocks(0).object(), 0)});
    request.set_pages_id(declared.pages_id());
    request.mutable_page_table()->Assign(table.begin(), table.end());
    return engine.engine.Land(request);
  };
  std::vector<int32_t> table = PagesOf(first, 0);
  std::swap(table[0], table[1]);
  EXPECT_THAT(Message(land(table).status()), HasSubstr("is shared; a prefix must land on"));
  const auto landed = land(PagesOf(first, 0));
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_THAT(*landed, ElementsAre(MissReason::kNone));
  ASSERT_TRUE(engine.MarkFilled('a', {0}).ok());

  tokens.back() = 7;
  const auto second = engine.Admit(ask('b', tokens));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(Contents(second), ElementsAre(PageContent::kFilled));
  EXPECT_EQ(PagesOf(second, 0), PagesOf(first, 0));
  // Other tokens and other salts have other blocks.
  v1::AdmitRequest salted = ask('c', tokens);
  salted.mutable_prompt()->set_salt(std::string(32, 's'));
  tokens.front() = 7;
  for (const v1::AdmitRequest& other : {salted, ask('d', tokens)}) {
    const auto refused = engine.Admit(other);
    ASSERT_TRUE(refused.ok()) << refused.status();
    EXPECT_EQ(refused->lacks().needed(), kPages);
  }
  v1::AdmitRequest longer = ask('e', tokens);
  longer.set_prefix_blocks(2);
  EXPECT_THAT(Message(engine.Admit(longer).status()), StartsWith("prefix_blocks: 2 is out of range; the prompt has 1"));
}

TEST(EnginePages, UnsharedSegmentsHaveNoPages) {
  TestNode node;
  SharingEngine engine(node);
  v1::AdmitRequest request = engine.Request('a', 5);
  request.add_unshared_segments(1);
  // The third segment equals the second.
  std::vector<int32_t> tokens = Ascending(40, 1);
  std::copy_n(tokens.begin() + 6, 15, tokens.begin() + 21);
  request.mutable_prompt()->set_tokens(PackTokens(tokens));
  const auto admitted = engine.Admit(request);
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  EXPECT_EQ(PagesOf(admitted, 0).size(), 2u);
  EXPECT_EQ(PagesOf(admitted, 1).size(), 0u);
  EXPECT_EQ(PagesOf(admitted, 2).size(), 3u);
  EXPECT_THAT(Contents(admitted), ElementsAre(PageContent::kToFill, PageContent::kFilled, PageContent::kToFill));
  EXPECT_THAT(Message(engine.MarkFilled('a', {1})), StartsWith("segments[0]: has no shared pages"));
  request.set_lease(std::string(16, 'b'));
  request.add_unshared_segments(3);
  EXPECT_THAT(Message(engine.Admit(request).status()),
              StartsWith("unshared_segments: 3 is out of range; the prompt has 3"));
}

TEST(EnginePages, SegmentsAreFilledByRequestsThatCanFillThem) {
  TestNode node;
  SharingEngine engine(node);
  const PageContent filled = PageContent::kFilled, to_fill = PageContent::kToFill, waits = PageContent::kBeingFilled;
  const std::vector<uint32_t> none, first = {0}, two = {0, 1}, unknown = {0, 3};
  v1::AdmitRequest later = engine.Request('a', 5);
  later.set_fills_later(true);
  EXPECT_THAT(Contents(engine.Admit(later)), ElementsAre(waits, waits, waits));
  EXPECT_THAT(Message(engine.MarkFilled('a', {1})), HasSubstr("is being filled by another request"));
  EXPECT_THAT(Contents(engine.Admit('b', 5)), ElementsAre(to_fill, to_fill, to_fill));
  EXPECT_THAT(Contents(engine.Attach('b', first)), ElementsAre(to_fill, waits, waits));
  EXPECT_THAT(Contents(engine.Attach('a')), ElementsAre(waits, waits, waits));
  EXPECT_THAT(Contents(engine.Attach('a', two)), ElementsAre(waits, to_fill, waits));
  EXPECT_TRUE(engine.MarkFilled('a', {1}).ok());
  EXPECT_THAT(Contents(engine.Attach('b', none)), ElementsAre(waits, filled, waits));
  EXPECT_THAT(Contents(engine.Attach('a')), ElementsAre(to_fill, filled, waits));
  EXPECT_THAT(Message(engine.Attach('a', unknown).status()),
              StartsWith("to_fill.segments[1]: out of range; the request has 3 segments"));
}

TEST(EnginePages, ARequestThatDoesNotFitReportsTheShortage) {
  TestNode node;
  SharingEngine engine(node);
  ASSERT_TRUE(engine.Admit('a', 30)->has_admission());
  const auto refused = engine.Admit('b', 40);
  ASSERT_TRUE(refused.ok()) << refused.status();
  EXPECT_FALSE(refused->has_admission());
  EXPECT_EQ(refused->lacks().needed(), 40u);
  EXPECT_EQ(refused->lacks().free(), kPages - 38);
  EXPECT_EQ(refused->lacks().reclaimable(), 0u);
  EXPECT_EQ(refused->lacks().held(), 38u);
  EXPECT_EQ(engine.Attach('b').status().code(), absl::StatusCode::kNotFound);
  const auto extended = engine.Extend('a', 60);
  ASSERT_TRUE(extended.ok()) << extended.status();
  EXPECT_EQ(extended->lacks().needed(), 30u);
  ASSERT_TRUE(engine.Extend('a', 56)->has_admission());
  EXPECT_EQ(engine.Extend('a', 56)->admission().own_pages_size(), 56);
  engine.Release('a');
  EXPECT_TRUE(engine.Admit('b', 40)->has_admission());
}

TEST(EnginePages, AKilledEngineFreesOnlyRequestsItStillHolds) {
  TestNode node;
  SharingEngine worker(node);
  // The worker is another process of the engine. The memory that it hosts has no effect here.
  auto engine = std::make_unique<SharingEngine>(node);
  UniqueFd memory;
  engine->hosted = engine->Host(TestEngine::kRegionBytes, &memory);
  ASSERT_TRUE(engine->Declare().ok());
  ASSERT_TRUE(engine->Admit('a', 5)->has_admission());
  ASSERT_TRUE(engine->Admit('b', 5)->has_admission());
  const auto before = engine->Attach('b');
  const auto passed = worker.Attach('b');
  ASSERT_TRUE(passed.ok()) << passed.status();
  EXPECT_EQ(passed->SerializeAsString(), before->SerializeAsString());
  engine->engine.socket().Close();
  // An attach that comes too early makes its session a holder.
  ASSERT_TRUE(Eventually([&] { return absl::IsUnauthenticated(engine->Attach('b').status()); }));
  EXPECT_EQ(worker.Attach('a').status().code(), absl::StatusCode::kNotFound);

  // The engine reconnects with the same memory. As long as the worker's request runs, its pages are not allocated
  // again.
  SharingEngine again(node);
  v1::SessionRequest request;
  request.mutable_register_region()->set_bytes(TestEngine::kRegionBytes);
  const int descriptor = memory.get();
  const auto registered = again.engine.socket().Ask(request, {&descriptor, 1});
  ASSERT_TRUE(StatusOf(registered).ok()) << StatusOf(registered);
  again.hosted = registered->region().region();
  EXPECT_EQ(again.Declare().code(), absl::StatusCode::kResourceExhausted);
  worker.Release('b');
  ASSERT_TRUE(again.Declare().ok());
  EXPECT_TRUE(again.Admit('c', kPages - 8)->has_admission());
}

TEST(EnginePages, DeclaringAgainEndsAnIdlePool) {
  TestNode node;
  SharingEngine engine(node);
  const uint64_t before = engine.pages;
  ASSERT_TRUE(engine.Admit('a', 1)->has_admission());
  EXPECT_THAT(Message(engine.Declare()), HasSubstr("requests still hold pages"));
  EXPECT_EQ(engine.pages, before);
  EXPECT_TRUE(engine.Admit('b', 1)->has_admission());
  engine.Release('a');
  engine.Release('b');
  EXPECT_TRUE(engine.Declare().ok());
  EXPECT_NE(engine.pages, before);
  EXPECT_TRUE(engine.Admit('a', kPages - 8)->has_admission());
}

TEST(EnginePages, MalformedRequestsAreRefusedByName) {
  TestNode node;
  SharingEngine engine(node);
  v1::DeclarePagesRequest declaration = engine.PagesRequest();
  v1::DeclarePagesReply ignored;
  declaration.set_region(engine.engine.region());
  EXPECT_THAT(Message(engine.engine.Call(declaration, &ignored)), StartsWith("allocate: requires a hosted region"));
  declaration = engine.PagesRequest();
  declaration.set_pages(limits::kMaxAllocatedPages + 1);
  EXPECT_THAT(Message(engine.engine.Call(declaration, &ignored)),
              StartsWith("pages: too many; expected at most 1048576"));

  const struct {
    const char* error;
    std::function<void(v1::AdmitRequest&)> spoil;
  } kCases[] = {
      {"pages_id: unknown handle 999", [](auto& r) { r.set_pages_id(999); }},
      {"lease: wrong length; expected 16 bytes", [](auto& r) { r.set_lease("short"); }},
      {"deadline_ns: negative; expected 0 or more", [](auto& r) { r.set_deadline_ns(-1); }},
      {"prompt.needed_in_ns", [](auto& r) { r.mutable_prompt()->set_needed_in_ns(1); }},
      {"prompt.tokens: length is not a multiple of 4 bytes", [](auto& r) { r.mutable_prompt()->set_tokens("abc"); }},
      {"prompt.segment_lengths[1]: 0; expected", [](auto& r) { r.mutable_prompt()->set_segment_lengths(1, 0); }},
      {"prompt.segment_lengths[2]: exceeds the tokens left",
       [](auto& r) { r.mutable_prompt()->set_segment_lengths(2, 20); }},
  };
  for (const auto& [error, spoil] : kCases) {
    v1::AdmitRequest request = engine.Request('a', 1);
    spoil(request);
    const auto reply = engine.Admit(request);
    EXPECT_EQ(reply.status().code(), absl::StatusCode::kInvalidArgument) << error;
    EXPECT_THAT(Message(reply.status()), StartsWith(error));
  }
  v1::AdmitRequest late = engine.Request('a', 1);
  late.set_deadline_ns(1);
  EXPECT_EQ(engine.Admit(late).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine.Attach('a').status().code(), absl::StatusCode::kNotFound);

  ASSERT_TRUE(engine.Admit('a', 1)->has_admission());
  EXPECT_EQ(engine.Admit('a', 1).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Message(engine.MarkFilled('a', {0, 3})), StartsWith("segments[1]: out of range; the request has 3"));
  EXPECT_THAT(Contents(engine.Attach('a')),
              ElementsAre(PageContent::kToFill, PageContent::kToFill, PageContent::kToFill));  // all or nothing
  EXPECT_EQ(engine.MarkFilled('b', {0}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine.Extend('b', 1).status().code(), absl::StatusCode::kNotFound);
  // Pages that the engine allocates itself.
  v1::AdmitRequest own = engine.Request('c', 1);
  own.set_pages_id(engine.engine.pages());
  EXPECT_THAT(Message(engine.Admit(own).status()), StartsWith("pages_id: "));
}

// Landing a cached segment into the pages that requests share.
class EnginePagesLandTest : public testing::TestWithParam<StoredKeys> {
 protected:
  void SetUp() override {
    sharing_.engine.FillMemory();
    // The session's last declaration belongs to the pool; objects come from the engine's own region.
    v1::DeclarePagesReply reply;
    ASSERT_TRUE(sharing_.engine.Call(sharing_.engine.PagesRequest(), &reply).ok());
    auto publish = sharing_.engine.Reserve(ObjectKind::kSegment, std::span(tokens_).subspan(6, 15));
    v1::PublishObject object = sharing_.engine.Sources(ObjectKind::kSegment, publish.reservation(), 15);
    object.set_pages_id(reply.pages_id());
    ASSERT_EQ(sharing_.engine.Publish(object), PublishOutcome::kPublished);
    ASSERT_TRUE(sharing_.Declare().ok());
    const auto match = sharing_.engine.Match(tokens_, {6, 15, 15});
    ASSERT_TRUE(match.ok()) << match.status();
    lease_ = match->lease();
    admission_ = *sharing_.Admit('a', 5);
    ASSERT_TRUE(admission_.has_admission());
  }

  // Only segment 1, with its pages at the front of the table: its page 0 is not shared.
  v1::LandRequest ToSegment(uint64_t first_position) {
    v1::LandRequest request = sharing_.engine.LandRequest(lease_, {At(1, first_position)});
    request.set_landing(++landings_);
    request.set_pages_id(sharing_.pages);
    request.clear_page_table();
    for (uint64_t page = 0; page < 1 + first_position / 4; ++page) request.add_page_table(-1);
    for (const int32_t page : admission_.admission().segments(1).pages()) request.add_page_table(page);
    return request;
  }

  TestNode node_;
  SharingEngine sharing_{node_, GetParam()};
  const std::vector<int32_t> tokens_ = Ascending(40, 1);
  std::string lease_;
  v1::AdmitReply admission_;
  uint64_t landings_ = 0;
};

TEST_P(EnginePagesLandTest, FillsSharedPagesOnlyWithTheSameBytesForEveryRequest) {
  // Token 0 is at slot 1 of the segment's pages. One page later, unrotated keys are the same bytes.
  const auto moved = sharing_.engine.Land(ToSegment(5));
  if (GetParam() == StoredKeys::kUnrotated) {
    ASSERT_TRUE(moved.ok()) << moved.status();
    EXPECT_THAT(*moved, ElementsAre(MissReason::kNone));
  } else {
    EXPECT_THAT(Message(moved.status()),
                StartsWith("segments[0].first_position: keys in shared pages must not depend on the prompt"));
  }
  EXPECT_THAT(Message(sharing_.engine.Land(ToSegment(2)).status()),
              StartsWith("segments[0].first_position: keys in shared pages"));
  const auto landed = sharing_.engine.Land(ToSegment(1));
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_THAT(*landed, ElementsAre(MissReason::kNone));
  ASSERT_TRUE(sharing_.MarkFilled('a', {1}).ok());
  EXPECT_THAT(Message(sharing_.engine.Land(ToSegment(1)).status()),
              HasSubstr("cannot be written; expected a page of the request"));
}

TEST_P(EnginePagesLandTest, OwnPagesAcceptKeysAtAnyPosition) {
  v1::LandRequest request = ToSegment(6);
  request.clear_page_table();
  for (int i = 0; i < 6; ++i) request.add_page_table(i == 0 ? -1 : admission_.admission().own_pages(i - 1));
  const auto landed = sharing_.engine.Land(request);
  ASSERT_TRUE(landed.ok()) << landed.status();
  EXPECT_THAT(*landed, ElementsAre(MissReason::kNone));
  sharing_.Release('a');
  request.set_landing(++landings_);
  EXPECT_THAT(Message(sharing_.engine.Land(request).status()),
              HasSubstr("cannot be written; expected a page of the request"));
}

INSTANTIATE_TEST_SUITE_P(Stored, EnginePagesLandTest, testing::Values(StoredKeys::kUnrotated, StoredKeys::kZeroBased),
                         [](const auto& instance) {
                           return instance.param == StoredKeys::kUnrotated ? "Unrotated" : "ZeroBased";
                         });

}  // namespace
}  // namespace ashlar::daemon
