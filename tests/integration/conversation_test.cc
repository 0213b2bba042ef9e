// SPDX-License-Identifier: Apache-2.0
// Conversations of the reference engine over a real daemon: whatever happens to their stored states, the next turn is
// answered, with the bits of the same computation without a cache.
#include <sys/wait.h>

#include <cstring>
#include <string>

#include "examples/rag/conversation_serving.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/replay.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/serving_fixture.h"

namespace ashlar::integration {
namespace {

using rag::Conversation;
using rag::ConversationServing;
using rag::Turn;

// Passes end where the daemon may ask for checkpoints, so that states left by other runs of a text have the same bits.
constexpr uint32_t kPass = 64;

class Conversing : public Serving {
 protected:
  rag::Runtime runtime() { return {model_, passes_, kernels_, *queue_, pool_}; }

  void SetUp() override {
    rag::ServingOptions options = OptionsFor(daemon_.client_options());
    options.patience = patience_;
    options.prefixes = prefixes_;
    auto opened = ConversationServing::Open(runtime(), options);
    ASSERT_TRUE(opened.ok()) << opened.status();
    serving_ = *std::move(opened);
  }

  // The next turn, of `count` tokens. Whether or not it resumes, it must have the same bits as without a cache, except
  // for states rebuilt from a span.
  Turn Say(size_t count) {
    std::vector<int32_t>& text = conversation_.text.tokens;
    for (size_t i = 0; i < count; ++i) text.push_back(static_cast<int32_t>((i * 31 + text.size() * 7) % 251));
    const Turn turn = serving_->Serve(conversation_, /*decode=*/2).value();
    cuts_.Resume(turn.set->resumed);
    cuts_.Add(turn.runs);
    const auto expected = rag::Replay(runtime(), own_.pool(), std::span(text).first(turn.prompt_tokens), cuts_);
    if (turn.set->plan().prefix_span_tokens == 0) {
      EXPECT_EQ(turn.served.logits, expected.value());
    } else {  // its states were run through tokens one by one, not a pass at a time
      EXPECT_LE(rag::RelativeL2(turn.served.logits, expected.value()), kSame);
    }
    for (int64_t i = 1; i <= 2; ++i) cuts_.Add({static_cast<int64_t>(turn.prompt_tokens) + i});
    return turn;
  }
  uint64_t Left() const { return conversation_.text.tokens.size(); }

  static std::string Bytes(const float* floats, size_t count) {
    return {reinterpret_cast<const char*>(floats), count * sizeof(float)};
  }

  rag::Patience patience_{.land = std::chrono::milliseconds(500)};
  rag::PrefixUse prefixes_{.capture_tokens = kPass};
  refengine::Engine passes_{model_, kernels_, pool_, {.pass_tokens = kPass}};
  rag::LocalPages own_{config_, kPages};
  Conversation conversation_;
  rag::Cuts cuts_;
  std::unique_ptr<ConversationServing> serving_;
};

TEST_F(Conversing, CorruptStatesAreNotResumedFrom) {
  const Turn first = Say(300);
  const auto state = first.set->sequence->recurrent().State(0);
  ASSERT_GE(FlipInArenas(daemon_.pid(), Bytes(state.data(), 16)), 1);
  EXPECT_EQ(Say(40).set->resumed, 0u);
  const uint64_t left = Left();
  EXPECT_EQ(Say(40).set->resumed, left) << "committed again";
}

TEST_F(Conversing, CorruptKeysAreNotResumedFrom) {
  const Turn first = Say(600);
  const refengine::PagedLayerGeometry layer = serving_->pages().Geometry(1);
  const int32_t page = first.set->sequence->page_table()[270 / kPageTokens];  // page of the second block
  const uint8_t* key = serving_->cache().data() + layer.key_offset + page * layer.page_stride;
  ASSERT_GE(FlipInArenas(daemon_.pid(), Bytes(reinterpret_cast<const float*>(key), 16)), 1);
  EXPECT_EQ(Say(40).set->resumed, 0u);
  const uint64_t left = Left();
  EXPECT_EQ(Say(40).set->resumed, left) << "committed again";
}

TEST_F(Conversing, ADaemonThatDiesDuringAPrefixLandingOnlyCostsTime) {
  // The daemon may finish before it dies; then nothing is lost, and the test tries again.
  bool lost = false;
  for (int attempt = 0; attempt < 10 && !lost; ++attempt) {
    conversation_ = Conversation();
    cuts_ = {};
    Say(1200);
    const pid_t killer = SignalWhenItLands(serving_->cache(), serving_->pages(), SIGKILL);
    lost = Say(40).set->resumed == 0;
    EXPECT_EQ(waitpid(killer, nullptr, 0), killer);
    daemon_.Kill();
    EXPECT_EQ(Say(40).set->resumed, 0u) << "the daemon is dead";
    daemon_.Start();
    ASSERT_TRUE(Eventually([&] { return serving_->cache().connected(); }));
  }
  EXPECT_TRUE(lost) << "every landing was over before the daemon died";
}

// States, and spans from which states are rebuilt, that only the disk has kept.
class ConversingFromDisk : public Conversing, public testing::WithParamInterface<uint32_t> {
 protected:
  void SetUp() override {
    daemon_.Configure(
        {.dram = "512MiB", .arena = "64MiB", .ssd = "512MiB", .admission = "all", .drain_seconds = 30, .threads = 1});
    ASSERT_EQ(daemon_.Terminate(), 0);
    daemon_.Start();
    prefixes_.span_tokens = GetParam();
    patience_ = {};
    Conversing::SetUp();
  }
};

TEST_P(ConversingFromDisk, ResumesFromObjectsLoadedFromDisk) {
  Say(600).set->request.Release();  // otherwise its lease would delay the daemon
  for (int turn = 0; turn < 3; ++turn) {
    const uint64_t left = Left();
    ASSERT_EQ(daemon_.Terminate(), 0);
    daemon_.Start();
    ASSERT_TRUE(Eventually([&] { return serving_->cache().connected(); }));
    const Turn said = Say(40);
    EXPECT_EQ(said.set->resumed, left);
    EXPECT_EQ(static_cast<TierKind>(said.set->plan().prefix_tier), TierKind::kSsd);
    EXPECT_EQ(said.set->plan().prefix_span_tokens > 0, GetParam() > 0);
    said.set->request.Release();
  }
}
INSTANTIATE_TEST_SUITE_P(Spans, ConversingFromDisk, testing::Values(0u, 128u));

}  // namespace
}  // namespace ashlar::integration
