// SPDX-License-Identifier: Apache-2.0
// Buffered spans end to end: a prompt that diverges inside a text resumes at that token, from bytes in the daemon's
// memory, whether the engine or the library runs the recurrence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/host/thread_pool.h"
#include "tests/integration/content.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/prefix_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr uint32_t kSpan = 48;
constexpr PrefixUse kUse{.capture_tokens = 1, .span_tokens = kSpan, .span_dtype = DType::kF16};
constexpr uint32_t kSpanCaptures = 8;  // sets of states, whose space the span's rows use

Tokens First(const Tokens& tokens, size_t count) {
  return {tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count)};
}

// One number of the recurrence's inputs for the last token of `prefix`: short keys, log decays ≤ 0, β in [0, 1].
float Number(std::span<const int32_t> prefix, uint32_t layer, PartForm form, uint64_t index) {
  const float number = Content(ObjectKind::kSpan, prefix, layer, form, 0).At(index);
  if (form == PartForm::kSpanGates) return -std::fabs(number);
  if (form == PartForm::kSpanBetas) return std::fabs(number);
  return form == PartForm::kSpanKeys ? number / 8 : number;
}

class SpanEngine : public PrefixEngine {
 public:
  explicit SpanEngine(const ClientOptions& options) : PrefixEngine(options, {}, kUse, kSpanCaptures) {}

  // Like Compute, with the span from `begin`.
  CommitParts WithSpan(const Text& text, uint64_t begin) {
    CommitParts parts = Compute(text);
    parts.span.begin = begin;
    std::byte* at = SpareMemory();
    const auto write = [&](uint32_t layer, PartForm form, uint64_t numbers, DType dtype) {
      std::byte* const rows = at;
      for (uint64_t token = begin; token < text.tokens.size(); ++token) {
        const auto prefix = std::span(text.tokens).first(token + 1);
        for (uint64_t i = 0; i < numbers; ++i) {
          kernels::WriteElement(dtype, rows, static_cast<int64_t>((token - begin) * numbers + i),
                                Number(prefix, layer, form, i));
        }
      }
      at += (text.tokens.size() - begin) * numbers * ElementBytes(dtype);
      return rows;
    };
    constexpr auto kHalf = DType::kF16, kFloat = DType::kF32;
    for (uint32_t layer = 0; layer < 2 * shape().layers; layer += 2) {
      CapturedSpan::Linear rows{.layer = layer};
      rows.keys = write(layer, PartForm::kSpanKeys, kKeyHeads * kDk, kHalf);
      rows.values = write(layer, PartForm::kSpanValues, kValueHeads * kDv, kHalf);
      rows.gates = reinterpret_cast<float*>(write(layer, PartForm::kSpanGates, kValueHeads, kFloat));
      rows.betas = reinterpret_cast<float*>(write(layer, PartForm::kSpanBetas, kValueHeads, kFloat));
      rows.conv_inputs = write(layer, PartForm::kSpanConvInputs, kChannels, kFloat);
      parts.span.linear.push_back(rows);
    }
    return parts;
  }

  // The state of a layer after a match's prefix, computed by this process's kernels; the bytes of all heads.
  std::vector<float> Rebuilt(const Match& match, uint32_t layer) const {
    const Layout layout = Whole();
    const SpanInputs inputs(std::get<LinearLayer>(layout.layers[layer]), *match.prefix_span(), layer);
    std::vector<float> state(size_t{kValueHeads} * kDk * kDv);
    std::vector<void*> heads;
    for (uint32_t head = 0; head < kValueHeads; ++head) heads.push_back(state.data() + size_t{head} * kDk * kDv);
    const kernels::TupleView& checkpoint = (*match.prefix_states())[layer].view;
    const kernels::SeamStep steps[] = {{.interior = &checkpoint}, {.begin = 0, .end = inputs.inputs().tokens}};
    const auto queue = kernels::Host().MakeQueue(nullptr);
    kernels::Host()
        .AdvanceSeam(
            {.shape = {.family = Family::kGdn, .heads = kValueHeads, .key_heads = kKeyHeads, .d_k = kDk, .d_v = kDv},
             .steps = steps,
             .inputs = inputs.inputs(),
             .state = {.heads = heads.data()}},
            *queue)
        .Wait();
    return state;
  }
};

class PrefixSpan : public testing::Test {
 protected:
  // States before the last 20 of 620 tokens, and a span of these 20.
  void Keep(SpanEngine& engine) {
    const Text text{text_, {600, text_.size()}};
    EXPECT_THAT(engine.model().Commit(nullptr, engine.WithSpan(text, 600)),
                ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  }
  // The match's span inputs are those of the prompt's tokens, rounded to the span's type.
  static void ExpectInputs(const Match& match, const Tokens& prompt) {
    const MappedSpan* const span = match.prefix_span();
    ASSERT_NE(span, nullptr);
    const uint64_t begin = match.prefix().depth - match.prefix().span_tokens;
    ASSERT_EQ(span->tokens, match.prefix().span_tokens);
    size_t wrong = 0;
    for (const uint32_t layer : {0u, 2u}) {
      const MappedSpan::Layer& rows = span->layers[layer];
      for (uint64_t token = 0; token < span->tokens; ++token) {
        const auto prefix = std::span(prompt).first(begin + token + 1);
        for (const auto& [form, mapped, numbers] : {std::tuple(PartForm::kSpanKeys, &rows.keys, kKeyHeads * kDk),
                                                    {PartForm::kSpanValues, &rows.values, kValueHeads * kDv},
                                                    {PartForm::kSpanGates, &rows.gates, kValueHeads},
                                                    {PartForm::kSpanBetas, &rows.betas, kValueHeads},
                                                    {PartForm::kSpanConvInputs, &rows.conv_inputs, kChannels}}) {
          for (uint32_t i = 0; i < numbers; ++i) {
            const float expected = Number(prefix, layer, form, i);
            const float found = kernels::ReadElement(mapped->dtype, mapped->Row(token), i);
            const bool half = mapped->dtype == DType::kF16;
            wrong += std::fabs(found - expected) > (half ? 1e-3f : 0.0f) ? 1 : 0;
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0u);
  }

  const Tokens text_ = MakeRun(1, 620);
  DaemonProcess daemon_;
};

TEST_F(PrefixSpan, IsFoundOnlyUnderItsSalt) {
  SpanEngine engine(daemon_.client_options());
  const Salt one = MakeSalt("one"), another = MakeSalt("another");
  const Text text{text_, {600, text_.size()}};
  CommitParts parts = engine.WithSpan(text, 600);
  parts.salt = one;
  EXPECT_THAT(engine.model().Commit(nullptr, parts), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  const Tokens prompt = Join(First(text_, 610), MakeRun(2, 30));
  const auto depth = [&](const Salt& salt) {
    return engine.model().Lookup({.tokens = prompt, .salt = salt}).prefix().depth;
  };
  EXPECT_EQ(depth(one), 610u);
  EXPECT_EQ(depth(another), 0u);
  EXPECT_EQ(depth({}), 0u);
  Keep(engine);  // new for prompts without a salt
  EXPECT_EQ(depth({}), 610u);
  EXPECT_EQ(depth(another), 0u);
}

TEST_F(PrefixSpan, APromptThatDivergesInsideResumesAtThatToken) {
  SpanEngine engine(daemon_.client_options());
  Keep(engine);
  for (const size_t common : {601, 607, 620}) {
    SCOPED_TRACE(common);
    const Tokens prompt = Join(First(text_, common), MakeRun(2, 30));
    const Match match = engine.Lookup(prompt);
    EXPECT_EQ(match.prefix().span_tokens, common - 600);
    EXPECT_THAT(match.resumable(), testing::Contains(common - (common > 601 ? 1 : 0)));
    engine.ExpectResumes(match, prompt, common);
    ExpectInputs(match, prompt);
    EXPECT_TRUE(match.valid());
  }
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_prefix_spans{tenant=\"default\"}") == 1; }));
  EXPECT_GT(daemon_.Metric("ashlar_prefix_span_saved_bytes{tenant=\"default\"}"), 0);
  EXPECT_EQ(daemon_.Metric("ashlar_prefix_commits_total{outcome=\"kept_as_span\",source=\"tree\",tenant=\"default\"}"),
            1);
}

// An engine without kernels runs the same inputs through the daemon's.
TEST_F(PrefixSpan, TheDaemonRebuildsWithTheSameBits) {
  SpanEngine engine(daemon_.client_options());
  Keep(engine);
  const Match match = engine.Lookup(Join(First(text_, 613), MakeRun(2, 30)));
  ASSERT_EQ(match.prefix().span_tokens, 13u);
  const LandSegment prefix{.segment = LandSegment::kPrefix, .tuples_only = true};
  ASSERT_THAT(engine.model().Land(match, {}, {&prefix, 1}).Wait(kPatience), testing::Each(MissReason::kNone));
  const Layout layout = engine.Whole();
  const SpanInputs inputs(std::get<LinearLayer>(layout.layers[2]), *match.prefix_span(), 2);
  kernels::TokenInputs rows = inputs.inputs();
  auto* at = reinterpret_cast<float*>(engine.SpareMemory());
  for (const auto& [data, stride] : {std::pair(&rows.k, rows.k_stride),
                                     {&rows.v, rows.v_stride},
                                     {&rows.g, rows.g_stride},
                                     {&rows.beta, rows.beta_stride}}) {
    *data = std::copy(*data, *data + rows.tokens * stride, at) - rows.tokens * stride;
    at += rows.tokens * stride;
  }
  const AdvanceStep steps[] = {{.segment = LandSegment{.segment = LandSegment::kPrefix}},
                               {.begin = 0, .end = rows.tokens}};
  auto* const state = reinterpret_cast<std::byte*>(engine.StatePlace());
  const Composition rebuilt = engine.model().Advance(
      &match, {.layer = 2, .steps = steps, .region = engine.region(), .state = {state}, .inputs = rows});
  ASSERT_EQ(rebuilt.reason(), MissReason::kNone);
  const std::vector<float> expected = engine.Rebuilt(match, 2);
  EXPECT_EQ(std::memcmp(state, expected.data(), expected.size() * sizeof(float)), 0);
  const std::string before = engine.StateAfter(First(text_, 600), 2);
  EXPECT_NE(std::memcmp(state, before.data(), before.size()), 0) << "the tokens count";
}

TEST_F(PrefixSpan, EnginesWithoutSpansAreUnaffected) {
  SpanEngine engine(daemon_.client_options());
  PrefixEngine plain(daemon_.client_options());
  Keep(engine);
  const Tokens prompt = Join(First(text_, 613), MakeRun(2, 30));
  const Match match = plain.Lookup(prompt);
  EXPECT_EQ(match.prefix().span_tokens, 0u);
  EXPECT_EQ(match.prefix_span(), nullptr);
  plain.ExpectResumes(match, prompt, 600);
}

TEST_F(PrefixSpan, BadSpansAreNotKept) {
  SpanEngine engine(daemon_.client_options());
  const Text text{text_, {600, text_.size()}};
  const CommitParts good = engine.WithSpan(text, 600);
  const auto outcomes = [&](CommitParts parts) { return engine.model().Commit(nullptr, parts); };
  CommitParts parts = good;
  parts.span.linear[1].values = engine.region().data() + engine.region().size() - 4;
  EXPECT_THAT(outcomes(parts), Each(CommitOutcome::kBadSource)) << "outside the region";
  parts = good;
  parts.span.linear.pop_back();
  EXPECT_THAT(outcomes(parts), Each(CommitOutcome::kBadSource)) << "a layer is missing";
  parts = good;
  parts.span.linear[0].betas = nullptr;
  EXPECT_THAT(outcomes(parts), Each(CommitOutcome::kBadSource)) << "what the family has is missing";
  for (const uint64_t begin : {uint64_t{0}, text_.size(), text_.size() - kSpan - 1}) {
    parts = good;
    parts.span.begin = begin;
    EXPECT_THAT(outcomes(parts), Each(CommitOutcome::kBadSource)) << "from " << begin;
  }
  EXPECT_EQ(engine.Lookup(Join(text_, MakeRun(2, 30))).prefix().depth, 0u);
  EXPECT_THAT(outcomes(good), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
}

TEST_F(PrefixSpan, ACorruptSpanIsMissedAndDropped) {
  SpanEngine engine(daemon_.client_options());
  Keep(engine);
  const Tokens prompt = Join(First(text_, 613), MakeRun(2, 30));
  const Match match = engine.Lookup(prompt);
  ASSERT_EQ(match.prefix().depth, 613u);
  std::string input(kChannels * sizeof(float), '\0');  // of a token after the prompt's: the whole span is verified
  for (uint32_t i = 0; i < kChannels; ++i) {
    const float number = Number(std::span(text_).first(619), 2, PartForm::kSpanConvInputs, i);
    std::memcpy(input.data() + i * sizeof number, &number, sizeof number);
  }
  ASSERT_EQ(FlipInArenas(daemon_.pid(), input), 1);
  EXPECT_THAT(engine.LandPrefix(match).Wait(kPatience), ElementsAre(MissReason::kChecksumFailed));
  engine.ExpectResumes(engine.Lookup(prompt), prompt, 600);
}

TEST_F(PrefixSpan, OtherProcessesAttach) {
  SpanEngine engine(daemon_.client_options()), other(daemon_.client_options());
  Keep(engine);
  const Tokens prompt = Join(First(text_, 613), MakeRun(2, 30));
  const Match match = engine.Lookup(prompt), attached = other.model().Attach(match.lease(), {});
  EXPECT_EQ(attached.prefix().span_tokens, 13u);
  other.ExpectResumes(attached, prompt, 613);
  ExpectInputs(attached, prompt);
}

// A layer whose rows do not fit an extent has no spans, and opening names the layer.
TEST_F(PrefixSpan, ModelsThatCannotHaveSpansAreRefusedByName) {
  SpanEngine engine(daemon_.client_options());
  Layout wide = engine.Whole();
  std::get<LinearLayer>(wide.layers[2]) = {
      .family = Family::kKda, .key_heads = 1024, .value_heads = 1024, .d_k = 128, .d_v = 4};
  const auto refusal = [&](const Layout& layout, const PrefixUse& use) {
    return std::string(engine.client().OpenModel(TestEngine::identity(), layout, {}, {}, use).status().message());
  };
  EXPECT_THAT(refusal(wide, kUse), testing::HasSubstr("prefixes: layout.layers[2]: span_gates"));
  EXPECT_THAT(refusal(engine.Whole(), {.capture_tokens = 1, .span_tokens = 257}),
              testing::HasSubstr("prefixes.span_tokens: too large; expected at most 256"));
  EXPECT_THAT(refusal(engine.Whole(), {.capture_tokens = 1, .span_tokens = 8, .span_dtype = DType::kF8E4M3}),
              testing::HasSubstr("prefixes.span_dtype"));
}

}  // namespace
}  // namespace ashlar::integration
