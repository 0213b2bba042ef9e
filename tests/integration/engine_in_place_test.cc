// SPDX-License-Identifier: Apache-2.0
// In-place sharing through the engine API: requests read one copy of each segment, and of each whole block of a prefix,
// in pages that the daemon allocates.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/background.h"
#include "client/engine/cache_state.h"
#include "client/engine/handles.h"
#include "client/engine/in_place_pages.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::StartsWith;

constexpr uint32_t kLinear = 0, kAttention = 1, kHeads = 2, kDim = 8, kPageTokens = 16, kSeam = 4, kPages = 192;
constexpr float kDecays[kHeads] = {-0.3F, -0.01F};

// An engine whose keys and values are its tokens' numbers.
class InPlaceEngine {
 public:
  explicit InPlaceEngine(const DaemonProcess& daemon, uint32_t land_ms = 5000, uint32_t capture_tokens = 0) {
    const std::string rpc = daemon.client_options().rpc_socket, session = daemon.client_options().session_socket;
    engine::OpenOptions options = Options(rpc, session);
    options.land_ms = land_ms;
    options.capture_tokens = capture_tokens;
    const engine::Status opened = Cache::Open(options, &cache);
    EXPECT_EQ(opened.code, Code::kOk) << opened.message;
    uint32_t count = 0;
    const engine::PagePlace* const places = cache.places(&count);
    if (count == 1) place_ = *places;
  }

  engine::OpenOptions Options(const std::string& rpc, const std::string& session) {
    layers_[kLinear] = {.kind = engine::LayerKind::kLinear, .family = Family::kRetnet, .decay_table = kDecays};
    layers_[kLinear].key_heads = layers_[kLinear].value_heads = kHeads;
    layers_[kLinear].d_k = layers_[kLinear].d_v = kDim;
    layers_[kAttention] = {.kind = engine::LayerKind::kGqa, .kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim};
    engine::OpenOptions options = {.rpc_socket = rpc.c_str(), .session_socket = session.c_str()};
    options.model = {.model_id = "in-place", .weights_digest = "1", .page_tokens = kPageTokens};
    options.model.head = options.model.tail = kSeam;
    options.model.layers = layers_;
    options.model.layer_count = 2;
    options.memory.pages = kPages;
    options.memory.share_in_place = true;
    return options;
  }

  float* Row(int32_t page, uint64_t slot, bool keys) {
    return reinterpret_cast<float*>(cache.data() + (keys ? place_.key_offset : place_.value_offset) +
                                    static_cast<uint64_t>(page) * place_.page_stride + slot * place_.token_stride);
  }
  static float Number(int32_t token, bool keys) { return static_cast<float>(token) + (keys ? 0.5F : 0.25F); }

  // Computes a missing run in the request's own pages, and publishes it.
  void Publish(Request& request, uint32_t missing) {
    uint32_t count = 0;
    const engine::Run& run = request.missing(&count)[missing];
    const engine::AdmittedPages& pages = request.admitted();
    ASSERT_GE(pages.own_page_count * kPageTokens, run.token_count);
    for (uint64_t i = 0; i < run.token_count; ++i) {
      for (const bool keys : {true, false}) {
        std::fill_n(Row(pages.own_pages[i / kPageTokens], i % kPageTokens, keys), kHeads * kDim,
                    Number(run.tokens[i], keys));
      }
    }
    std::vector<float> state(kHeads * kDim * kDim, static_cast<float>(run.tokens[0])), transition(kHeads, -0.5F);
    const engine::LinearTensors tensors = {
        .layer = kLinear, .state = state.data(), .transition = run.transition ? transition.data() : nullptr};
    uint8_t outcome = 0;
    ASSERT_GOOD(request.Publish(
        missing,
        {.linear = &tensors, .linear_count = 1, .page_table = pages.own_pages, .page_count = pages.own_page_count},
        &outcome));
    EXPECT_STREQ(engine::PublishName(outcome), "published");
  }
  void PublishMissing(Request& request) {
    uint32_t count = 0;
    request.missing(&count);
    for (uint32_t i = 0; i < count; ++i) Publish(request, i);
  }

  // The page of a position in a prompt without segments: those of the prefix come first, then the own pages.
  static int32_t PageOf(const Request& request, uint64_t position) {
    const engine::AdmittedPages& pages = request.admitted();
    const uint64_t page = position / kPageTokens, shared = request.plan().shared_prefix_tokens / kPageTokens;
    return page < shared ? pages.prefix.pages[page] : pages.own_pages[page - shared];
  }
  void WriteText(const Request& request, const Tokens& text) {
    for (uint64_t i = 0; i < text.size(); ++i) {
      for (const bool keys : {true, false}) {
        std::fill_n(Row(PageOf(request, i), i % kPageTokens, keys), kHeads * kDim, Number(text[i], keys));
      }
    }
  }
  void ExpectText(const Request& request, const Tokens& text) {
    int wrong = 0;
    for (uint64_t i = 0; i < text.size(); ++i) {
      for (const bool keys : {true, false}) {
        wrong += *Row(PageOf(request, i), i % kPageTokens, keys) != Number(text[i], keys);
      }
    }
    EXPECT_EQ(wrong, 0);
  }
  // Commits a text with states of 3 at its end. A conversation's states are composed.
  engine::Status Commit(const Request& request, const Tokens& text, uint8_t conversation, uint8_t* outcome) {
    std::vector<int32_t> table;
    for (uint64_t i = 0; i < text.size(); i += kPageTokens) table.push_back(PageOf(request, i));
    const std::vector<float> state(kHeads * kDim * kDim, 3.0F);
    const engine::LinearTensors tensors = {.layer = kLinear, .state = state.data()};
    const engine::Checkpoint end = {.depth = text.size(), .linear = &tensors, .linear_count = 1};
    engine::Text committed = {.request = &request,
                              .tokens = text.data(),
                              .token_count = text.size(),
                              .prompt_tokens = text.size(),
                              .checkpoints = &end,
                              .checkpoint_count = 1,
                              .page_table = table.data(),
                              .page_count = table.size()};
    committed.conversation[0] = conversation;
    committed.composed = conversation != 0;
    committed.outcomes = outcome;
    return cache.Commit(&committed, 1);
  }

  // Expects a segment's keys and values in its shared pages.
  void ExpectShared(const Request& request, size_t segment, const Tokens& tokens) {
    const engine::SharedSegment& shared = request.admitted().segments[segment];
    ASSERT_LT(shared.first_token, shared.end_token);
    int wrong = 0;
    for (uint64_t token = shared.first_token; token < shared.end_token; ++token) {
      const uint64_t slot = shared.first_slot + token;
      ASSERT_LT(slot / kPageTokens, shared.page_count);
      const int32_t page = shared.pages[slot / kPageTokens];
      ASSERT_GE(page, 0);
      for (const bool keys : {true, false}) {
        wrong += *Row(page, slot % kPageTokens, keys) != Number(tokens[token], keys);
      }
    }
    EXPECT_EQ(wrong, 0) << "segment " << segment;
  }

  Cache cache;

 private:
  engine::Layer layers_[2];
  engine::PagePlace place_ = {};
};

class InPlace : public testing::Test {
 protected:
  Request Begin(InPlaceEngine& engine, const Asked& asked) {
    Request request;
    const engine::Status begun = engine.cache.Begin(&asked.prompt, 1, &request);
    EXPECT_EQ(begun.code, Code::kOk) << begun.message;
    return request;
  }
  void PublishAll(InPlaceEngine& engine, const Asked& asked) {
    Asked filling = asked;
    filling.prompt.tokens = filling.tokens.data();
    filling.prompt.segment_lengths = filling.lengths.data();
    filling.prompt.fill = true;
    Request request = Begin(engine, filling);
    ASSERT_GOOD(request.Admit(kOwnPages, nullptr));
    engine.PublishMissing(request);
    ASSERT_GOOD(request.LookAgain());
    ASSERT_GOOD(request.WaitLayer(kAttention));
    ASSERT_GOOD(request.Finish());
    EXPECT_EQ(request.plan().cached_tokens, 50u + 83 + 33);
    for (size_t i = 0; i < segments_.size(); ++i) engine.ExpectShared(request, i, segments_[i]);
  }
  // A request that has to fill its segments and the first `blocks` blocks of its prefix, and does not.
  static Admitted AdmitIdle(const InPlaceEngine& engine, const Asked& asked, uint32_t blocks = 0) {
    const ashlar::Prompt prompt = {.tokens = asked.tokens, .segment_lengths = asked.lengths};
    std::vector<uint32_t> unshared(blocks > 0 ? asked.lengths.size() : 0);
    std::iota(unshared.begin(), unshared.end(), 0);
    Admitted idle = engine::Access::Of(engine.cache)->model.Admit(prompt, 0, blocks, unshared);
    EXPECT_EQ(idle.outcome, AdmitOutcome::kAdmitted);
    return idle;
  }
  // Occupies the threads that fill pages until the gate opens.
  static void BlockFills(engine::CacheState& cache, const std::shared_future<void>& gate) {
    const auto busy = std::make_shared<std::atomic<size_t>>(0);
    const auto block = [busy, gate] {
      ++*busy;
      gate.wait();
    };
    for (size_t i = 0; i < engine::Background::kMostThreads; ++i) ASSERT_NE(cache.fills.Start(block), nullptr);
    ASSERT_TRUE(Eventually([&] { return *busy == engine::Background::kMostThreads; }));
  }
  // A request that computes one missed segment, and fills no shared pages meanwhile.
  Request BeginComputing(InPlaceEngine& engine, Asked& filling) {
    filling.prompt.fill = true;
    Request request = Begin(engine, filling);
    uint32_t missing = 0;
    request.missing(&missing);
    EXPECT_EQ(missing, 1u);
    EXPECT_TRUE(request.Admit(kOwnPages, nullptr).ok());
    return request;
  }

  static constexpr uint32_t kOwnPages = 8;
  const std::vector<Tokens> segments_ = {MakeRun(1, 50), MakeRun(2, 91), MakeRun(3, 41)};
  DaemonProcess daemon_;
};

TEST_F(InPlace, MissedSegmentsArePublishedAndLandInSharedPages) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
}

TEST_F(InPlace, RequestsReadOneCopyAtAnyPosition) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  const Asked first_asked(segments_), second_asked({segments_[0], segments_[2], segments_[1], segments_[2]});
  Request first = Begin(engine, first_asked), second = Begin(engine, second_asked);
  // A batch: neither request finishes before the other can read.
  ASSERT_GOOD(first.Admit(kOwnPages, nullptr));
  ASSERT_GOOD(second.Admit(kOwnPages, nullptr));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ASSERT_GOOD(second.WaitLayer(layer));
    ASSERT_GOOD(first.WaitLayer(layer));
  }
  ASSERT_GOOD(second.Finish());
  ASSERT_GOOD(first.Finish());
  for (size_t i = 0; i < segments_.size(); ++i) engine.ExpectShared(first, i, segments_[i]);
  for (const size_t i : {1, 3}) engine.ExpectShared(second, i, segments_[2]);
  const engine::SharedSegment &here = first.admitted().segments[2], &there = second.admitted().segments[1];
  EXPECT_EQ(std::vector<int32_t>(here.pages, here.pages + here.page_count),
            std::vector<int32_t>(there.pages, there.pages + there.page_count));
  // The pages of the first stay allocated while the second ends.
  second = Request();
  for (size_t i = 0; i < segments_.size(); ++i) engine.ExpectShared(first, i, segments_[i]);
}

TEST_F(InPlace, PollingGivesTheSameResult) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  // Another engine's pages are empty: both requests find segments that must be filled.
  InPlaceEngine other(daemon_);
  const Asked asked(segments_);
  Request first = Begin(other, asked), second = Begin(other, asked);
  ASSERT_GOOD(first.Admit(kOwnPages, nullptr));
  ASSERT_GOOD(second.Admit(kOwnPages, nullptr));
  for (Request* request : {&second, &first}) {
    ASSERT_TRUE(Eventually([&] { return request->PollLayer(kAttention).code != Code::kPending; }));
    ASSERT_TRUE(Eventually([&] { return request->PollFinish().code == Code::kOk; }));
    for (size_t i = 0; i < segments_.size(); ++i) other.ExpectShared(*request, i, segments_[i]);
  }
}

TEST_F(InPlace, TheNextRequestFillsSegmentsOfAnEndedOne) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  InPlaceEngine other(daemon_);
  const Asked asked(segments_);
  std::optional<Admitted> idle = AdmitIdle(other, asked);
  Request second = Begin(other, asked);
  ASSERT_GOOD(second.Admit(kOwnPages, nullptr));
  EXPECT_EQ(second.PollLayer(kAttention).code, Code::kPending);
  idle.reset();
  ASSERT_GOOD(second.WaitLayer(kAttention));
  ASSERT_GOOD(second.Finish());
  for (size_t i = 0; i < segments_.size(); ++i) other.ExpectShared(second, i, segments_[i]);
}

TEST_F(InPlace, SegmentsThatAreNotFilledInTimeAreComputed) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  InPlaceEngine other(daemon_, /*land_ms=*/100);
  const Asked asked(segments_);
  std::optional<Admitted> idle = AdmitIdle(other, asked);
  Request second = Begin(other, asked);
  ASSERT_GOOD(second.Admit(kOwnPages, nullptr));
  EXPECT_EQ(second.WaitLayer(kAttention).code, Code::kRestart);
  EXPECT_EQ(second.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(second), "run 0-189 ");
  ASSERT_GOOD(second.Admit(12, nullptr));  // the new plan needs more
  EXPECT_EQ(second.admitted().own_page_count, 12u);
  ASSERT_GOOD(second.Finish());
  // Once the idle request has ended, the next one fills them, because the second no longer reads them.
  idle.reset();
  EXPECT_TRUE(Eventually([&] {
    Request third = Begin(other, asked);
    return third.Admit(kOwnPages, nullptr).ok() && third.WaitLayer(kAttention).ok();
  }));
}

TEST_F(InPlace, SegmentsOfARequestThatComputesOthersAreFilledAtOnce) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  InPlaceEngine other(daemon_);
  const Tokens missed = MakeRun(4, 60);
  Asked filling({segments_[0], segments_[1], segments_[2], missed});
  Request computing = BeginComputing(other, filling);
  const Asked asked(segments_);
  Request second = Begin(other, asked);
  ASSERT_GOOD(second.Admit(kOwnPages, nullptr));
  ASSERT_GOOD(second.WaitLayer(kAttention));
  ASSERT_GOOD(second.Finish());
  for (size_t i = 0; i < segments_.size(); ++i) {
    other.ExpectShared(second, i, segments_[i]);
    EXPECT_EQ(second.admitted().segments[i].pages[1], computing.admitted().segments[i].pages[1]);
  }
  other.PublishMissing(computing);
  ASSERT_GOOD(computing.LookAgain());
  ASSERT_GOOD(computing.WaitLayer(kAttention));
  ASSERT_GOOD(computing.Finish());
  for (size_t i = 0; i < segments_.size(); ++i) other.ExpectShared(computing, i, segments_[i]);
  other.ExpectShared(computing, 3, missed);
}

// Otherwise the daemon would publish what the next request writes there.
TEST_F(InPlace, AStartedPublishKeepsThePagesOfAnEndedRequest) {
  InPlaceEngine engine(daemon_);
  Asked filling({segments_[1]}), asked({segments_[2]});
  std::optional<Request> request = BeginComputing(engine, filling);
  // All threads that publish are busy.
  std::promise<void> gate;
  const std::shared_future<void> open = gate.get_future().share();
  for (size_t i = 0; i < engine::Background::kMostThreads; ++i) {
    ASSERT_NE(engine::Access::Of(engine.cache)->background.Start([open] { open.wait(); }), nullptr);
  }
  const std::vector<float> state(kHeads * kDim * kDim, 1.0F);
  const engine::LinearTensors tensors = {.layer = kLinear, .state = state.data()};
  const engine::AdmittedPages& pages = request->admitted();
  engine::Job job;
  uint8_t outcome = 0;
  ASSERT_GOOD(request->StartPublish(
      0, {.linear = &tensors, .linear_count = 1, .page_table = pages.own_pages, .page_count = pages.own_page_count},
      &outcome, &job));
  request.reset();
  Request next = Begin(engine, asked);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // pages are released in the background
  EXPECT_EQ(next.Admit(kPages, nullptr).code, Code::kNoPages);
  gate.set_value();
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::PublishName(outcome), "published");
  EXPECT_TRUE(Eventually([&] { return next.Admit(kPages, nullptr).ok(); }));
}

// A request that ends during StartLookAgain leaves a lookup, which may be the cache's last user.
TEST_F(InPlace, ALookupMayFillPagesWhileItsCacheEnds) {
  std::optional<InPlaceEngine> engine(std::in_place, daemon_);
  engine::CacheState& state = *engine::Access::Of(engine->cache);
  std::promise<void> gate;
  std::atomic<bool> started = false;
  const auto lookup = [&, open = gate.get_future().share()] {
    open.wait();
    started = state.fills.Start([] {}) != nullptr;
  };
  ASSERT_NE(state.lookups.Start(lookup), nullptr);
  std::future<void> ended = std::async(std::launch::async, [&engine] { engine.reset(); });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout) << "it waits for the lookup";
  gate.set_value();
  ended.get();
  EXPECT_TRUE(started);
}

TEST_F(InPlace, APollDoesNotWaitUntilALandingIsReported) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  InPlaceEngine other(daemon_);
  std::promise<void> gate;
  ASSERT_NO_FATAL_FAILURE(BlockFills(*engine::Access::Of(other.cache), gate.get_future().share()));
  const Asked asked(segments_);
  Request request = Begin(other, asked);
  ASSERT_GOOD(request.Admit(kOwnPages, nullptr));
  ASSERT_TRUE(Eventually([&] { return request.PollLayer(kLinear).ok(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the segments land
  daemon_.Freeze();
  gate.set_value();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the first of them is being reported
  const auto polled = std::chrono::steady_clock::now();
  EXPECT_EQ(request.PollLayer(kAttention).code, Code::kPending);
  EXPECT_LT(std::chrono::steady_clock::now() - polled, std::chrono::seconds(2));
  daemon_.Thaw();
  EXPECT_TRUE(Eventually([&] { return request.PollFinish().code == Code::kOk; }));
}

TEST_F(InPlace, AFillWithoutAThreadDoesNotWaitForTheDaemon) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  InPlaceEngine other(daemon_);
  engine::CacheState& state = *engine::Access::Of(other.cache);
  const Asked asked(segments_);
  const ashlar::Prompt prompt = {.tokens = asked.tokens, .segment_lengths = asked.lengths};
  const Match match = state.model.Lookup(prompt);
  std::shared_ptr<engine::InPlacePages> pages;
  ASSERT_GOOD(engine::AdmitInPlace(state, prompt, kOwnPages, {}, nullptr, &pages));
  std::promise<void> gate;
  ASSERT_NO_FATAL_FAILURE(BlockFills(state, gate.get_future().share()));
  while (state.fills.Start([] {}) != nullptr) {
  }
  daemon_.Freeze();
  std::future<void> filling = std::async(std::launch::async, [&] {
    pages->Fill(state, match, std::vector<uint32_t>{0, 1, 2}, std::chrono::milliseconds(0));
  });
  EXPECT_EQ(filling.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  daemon_.Thaw();
  filling.get();
  EXPECT_EQ(pages->WhyNotFilled(0), MissReason::kBusy);
  gate.set_value();
}

// If they had shared pages, the second request would wait for the first, which cannot fill them.
TEST_F(InPlace, MissedSegmentsOfARequestThatDoesNotFillHaveNoPages) {
  InPlaceEngine engine(daemon_);
  const Asked asked(segments_);
  Request first = Begin(engine, asked);
  ASSERT_GOOD(first.Admit(12, nullptr));
  ASSERT_EQ(first.admitted().segment_count, 3u);
  for (size_t i = 0; i < segments_.size(); ++i) {
    EXPECT_EQ(first.admitted().segments[i].page_count, 0u);
    EXPECT_EQ(first.admitted().segments[i].end_token, 0u);
  }
  PublishAll(engine, asked);
}

TEST_F(InPlace, AShortageNamesThePages) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  const Asked asked(segments_);
  Request first = Begin(engine, asked);
  engine::PageShortage shortage;
  EXPECT_EQ(first.Admit(kPages, &shortage).code, Code::kNoPages);
  EXPECT_EQ(shortage.needed, uint64_t{kPages});
  EXPECT_EQ(shortage.free + shortage.reclaimable + shortage.held, uint64_t{kPages});
  EXPECT_EQ(first.admitted().own_page_count, 0u);
  ASSERT_GOOD(first.Admit(kOwnPages, &shortage));
  EXPECT_EQ(first.Admit(kPages, nullptr).code, Code::kNoPages);
  ASSERT_GOOD(first.Admit(kOwnPages + 1, nullptr));
  EXPECT_EQ(first.admitted().own_page_count, kOwnPages + 1u);
  EXPECT_EQ(first.admitted().segment_count, 3u);
}

TEST_F(InPlace, RefusesInvalidArguments) {
  InPlaceEngine engine(daemon_);
  Asked asked(segments_);
  const int32_t table[12] = {};
  asked.prompt.page_table = table;
  asked.prompt.page_count = 12;
  Request request;
  EXPECT_THAT(Say(engine.cache.Begin(&asked.prompt, 1, &request)), StartsWith("3 prompts[0].page_table: the daemon"));
  PublishAll(engine, Asked(segments_));
  const Asked good(segments_);
  request = Begin(engine, good);
  EXPECT_THAT(Say(request.WaitLayer(kAttention)), StartsWith("9 the request has no pages: call Admit"));
  EXPECT_THAT(Say(request.Finish()), StartsWith("9 the request has no pages: call Admit"));

  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  Cache other;
  engine::OpenOptions options = engine.Options(rpc, session);
  options.memory.kind = engine::MemoryKind::kMemfd;
  EXPECT_THAT(Say(Cache::Open(options, &other)), StartsWith("3 memory.share_in_place: needs hosted memory"));
  options = engine.Options(rpc, session);
  options.memory.share_in_place = false;
  ASSERT_GOOD(Cache::Open(options, &other));
  ASSERT_GOOD(other.Begin(&good.prompt, 1, &request));
  EXPECT_THAT(Say(request.Admit(1, nullptr)), StartsWith("9 memory.share_in_place"));
}

TEST_F(InPlace, RequestsFromBeforeAReconnectEndFirst) {
  InPlaceEngine engine(daemon_);
  PublishAll(engine, Asked(segments_));
  const Asked asked(segments_);
  std::optional<Request> old = Begin(engine, asked);
  ASSERT_GOOD(old->Admit(kOwnPages, nullptr));
  ASSERT_GOOD(old->Finish());
  BreakConnections(daemon_.client_options().session_socket);
  EXPECT_TRUE(Eventually([&] { return old->Admit(kOwnPages + 1, nullptr).code == Code::kUnavailable; }));
  Request next;
  EXPECT_TRUE(Eventually([&] {
    return engine.cache.Begin(&asked.prompt, 1, &next).ok() &&
           next.Admit(kOwnPages, nullptr).code == Code::kFailedPrecondition;
  }));
  old.reset();
  EXPECT_TRUE(Eventually([&] { return next.Admit(kOwnPages, nullptr).ok(); }));
}

// A stored text has two whole blocks. The keys and values of its other tokens are in its checkpoint.
class InPlacePrefix : public InPlace {
 protected:
  static constexpr uint64_t kBlockTokens = 512;                       // of both blocks
  static constexpr uint32_t kBlockPages = 32, kOwn = 7, kWhole = 39;  // pages of the blocks, the rest, and a prompt

  // A prompt of 620 tokens that begins with the text.
  struct Longer : Asked {
    Longer(const Tokens& text, int32_t last) : Asked({text}, {}, 20) {
      tokens.back() = last;
      prompt.segment_count = 0;
    }
  };

  void Store(InPlaceEngine& engine, uint8_t conversation = 0) {
    Asked asked({text_}, {}, 0);
    asked.prompt.segment_count = 0;
    Request request = Begin(engine, asked);
    ASSERT_GOOD(request.Admit(kWhole, nullptr));
    engine.WriteText(request, text_);
    ASSERT_GOOD(request.Finish());
    uint8_t outcome = 0;
    ASSERT_GOOD(engine.Commit(request, text_, conversation, &outcome));
    EXPECT_STREQ(engine::CommitName(outcome), "kept");
  }

  const Tokens text_ = MakeRun(9, 600);
};

TEST_F(InPlacePrefix, RequestsReadOneCopyOfBlocks) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine);
  const Longer first_asked(text_, 1), second_asked(text_, 2);
  Request first = Begin(engine, first_asked), second = Begin(engine, second_asked);
  EXPECT_THAT(Say(first.Admit(5, nullptr)),
              StartsWith("3 own_pages: 5; the prefix's tokens after its shared pages need 6"));
  std::set<int32_t> pages;
  for (Request* request : {&first, &second}) {
    EXPECT_EQ(request->plan().prefix_tokens, text_.size());
    EXPECT_EQ(request->plan().shared_prefix_tokens, kBlockTokens);
    ASSERT_GOOD(request->Admit(kOwn, nullptr));
    const engine::AdmittedPages& admitted = request->admitted();
    ASSERT_EQ(admitted.prefix.page_count, kBlockPages);
    EXPECT_EQ(admitted.prefix.end_token, kBlockTokens);
    pages.insert(admitted.prefix.pages, admitted.prefix.pages + admitted.prefix.page_count);
    pages.insert(admitted.own_pages, admitted.own_pages + admitted.own_page_count);
  }
  EXPECT_EQ(pages.size(), kBlockPages + 2 * kOwn) << "two copies have " << 2 * kWhole << " pages";
  for (Request* request : {&second, &first}) {
    ASSERT_GOOD(request->WaitLayer(kLinear));
    engine::Tuple tuple;
    ASSERT_GOOD(request->StepTuple(0, kLinear, &tuple));
    EXPECT_EQ(*static_cast<const float*>(tuple.heads[0].state), 3.0F);
    ASSERT_GOOD(request->WaitLayer(kAttention));
    ASSERT_GOOD(request->Finish());
    engine.ExpectText(*request, text_);
  }
  second = Request();
  engine.ExpectText(first, text_);
}

TEST_F(InPlacePrefix, TheNextRequestFillsBlocksOfAnEndedOne) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine);
  InPlaceEngine other(daemon_, 5000, 16);
  const Longer asked(text_, 1);
  std::optional<Admitted> idle = AdmitIdle(other, asked, 2);
  Request second = Begin(other, asked);
  ASSERT_GOOD(second.Admit(kOwn, nullptr));
  EXPECT_EQ(second.PollLayer(kAttention).code, Code::kPending);
  idle.reset();
  ASSERT_GOOD(second.WaitLayer(kAttention));
  ASSERT_GOOD(second.Finish());
  other.ExpectText(second, text_);
}

TEST_F(InPlacePrefix, BlocksThatAreNotFilledInTimeAreComputed) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine);
  InPlaceEngine other(daemon_, /*land_ms=*/100, 16);
  const Longer asked(text_, 1);
  const Admitted idle = AdmitIdle(other, asked, 2);
  Request second = Begin(other, asked);
  ASSERT_GOOD(second.Admit(kOwn, nullptr));
  EXPECT_EQ(second.WaitLayer(kAttention).code, Code::kRestart);
  EXPECT_EQ(second.Finish().code, Code::kRestart);
  EXPECT_EQ(second.plan().cached_tokens, 0u);
  EXPECT_EQ(second.plan().shared_prefix_tokens, 0u);
  ASSERT_GOOD(second.Admit(kWhole, nullptr));
  ASSERT_GOOD(second.Finish());
}

TEST_F(InPlacePrefix, FilledPromptReadsPrefixInPlace) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine);
  Asked filling({text_, segments_[1]});
  Request request = BeginComputing(engine, filling);
  engine.PublishMissing(request);
  ASSERT_GOOD(request.LookAgain());
  EXPECT_EQ(request.plan().shared_prefix_tokens, kBlockTokens);
  ASSERT_GOOD(request.WaitLayer(kAttention));
  ASSERT_GOOD(request.Finish());
  engine.ExpectText(request, text_);
  engine.ExpectShared(request, 1, segments_[1]);
  uint8_t outcome = 0;
  EXPECT_THAT(Say(engine.Commit(request, text_, 9, &outcome)),
              StartsWith("3 texts[0].request: its plan reads segments"));
}

TEST_F(InPlacePrefix, SegmentsInsideThePrefixHaveNoPages) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine);
  const Asked asked({text_});
  Request request = Begin(engine, asked);
  EXPECT_EQ(request.plan().shared_prefix_tokens, kBlockTokens);
  ASSERT_GOOD(request.Admit(kOwn, nullptr));
  EXPECT_EQ(request.admitted().prefix.page_count, kBlockPages);
  ASSERT_EQ(request.admitted().segment_count, 1u);
  EXPECT_EQ(request.admitted().segments[0].page_count, 0u);
  ASSERT_GOOD(request.WaitLayer(kAttention));
  ASSERT_GOOD(request.Finish());
  engine.ExpectText(request, text_);
}

TEST_F(InPlacePrefix, OwnPrefixOfAConversationIsNotShared) {
  InPlaceEngine engine(daemon_, 5000, 16);
  Store(engine, /*conversation=*/9);
  Longer asked(text_, 1);
  asked.prompt.conversation[0] = 9;
  Request request = Begin(engine, asked);
  EXPECT_TRUE(request.plan().own);
  EXPECT_EQ(request.plan().prefix_tokens, text_.size());
  EXPECT_EQ(request.plan().shared_prefix_tokens, 0u);
  ASSERT_GOOD(request.Admit(kWhole, nullptr));
  EXPECT_EQ(request.admitted().prefix.page_count, 0u);
  ASSERT_GOOD(request.WaitLayer(kAttention));
  ASSERT_GOOD(request.Finish());
  engine.ExpectText(request, text_);
}

}  // namespace
}  // namespace ashlar::integration
