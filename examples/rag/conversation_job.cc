// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/conversation_job.h"

#include <algorithm>
#include <cstdio>

#include "examples/rag/baselines.h"
#include "examples/rag/chats.h"
#include "examples/rag/conversation_serving.h"
#include "examples/rag/fidelity.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/replay.h"
#include "examples/testing/local_daemon.h"
#include "kernels/host/thread_pool.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/prefix.h"

namespace ashlar::rag {
namespace {

using refengine::Sequence;

// Passes end where the daemon may ask for checkpoints, so that a resumed text has the same bits as one that was never
// interrupted. On the demo's model, passes of 128 tokens take as long as longer ones.
constexpr uint32_t kPassTokens = 128;
constexpr refengine::SeamWidths kTurnSeams{8, 8};

class ConversationJob {
 public:
  explicit ConversationJob(const ConversationOptions& options)
      : options_(options),
        pool_(options.job.threads),
        model_(refengine::DemoConfig(options.job.seed, options.job.family)),
        kernels_(kernels::Host()),
        queue_(kernels_.MakeQueue(&pool_)),
        engine_(model_, kernels_, pool_, {.pass_tokens = kPassTokens}),
        full_engine_(model_, kernels_, pool_) {}

  absl::StatusOr<ConversationResult> Run();

 private:
  // One conversation, and its reference.
  struct Tracked {
    Chat chat;
    Conversation conversation;
    Cuts cuts;                         // of an exact one
    std::unique_ptr<Sequence> stayed;  // of a composed one: the sequence of its first turn, which continues
  };

  absl::Status Prepare();
  absl::StatusOr<TurnResult> TakeTurn(Tracked& tracked, size_t turn);
  // Returns the logits that `turn` should have, cut in the same way; empty if there is no reference. `prompt`: its
  // tokens.
  absl::StatusOr<std::vector<float>> WithoutCache(Tracked& tracked, const Turn& turn, std::span<const int32_t> prompt);
  // Also runs the tokens that `turn` decoded.
  absl::Status FollowDecoding(Tracked& tracked, const Turn& turn);
  // Returns the error of the states that `turn` was resumed from against full recompute, relative L2, the worst
  // layer's.
  absl::StatusOr<double> StateError(const Turn& turn, std::span<const int32_t> prompt);
  // Returns how many more bytes states would have taken than the spans.
  uint64_t SavedBytes(const Turn& turn, uint64_t text) const;
  PrefixUse Use() const;
  Runtime runtime(refengine::Engine& engine) { return {model_, engine, kernels_, *queue_, pool_}; }

  const ConversationOptions options_;
  kernels::ThreadPool pool_;
  const refengine::Model model_;
  const kernels::Kernels& kernels_;
  const std::unique_ptr<kernels::Queue> queue_;
  refengine::Engine engine_, full_engine_;

  std::unique_ptr<tools::LocalDaemon> daemon_;
  std::unique_ptr<LocalPages> own_pages_;
  std::unique_ptr<ConversationServing> ashlar_;
  std::unique_ptr<FullRecompute> full_;
  std::vector<Tracked> tracked_;
};

PrefixUse ConversationJob::Use() const {
  PrefixUse use{.capture_tokens = kPassTokens};
  if (!options_.regenerate) return use;
  // An answer, and the prompt's last token.
  use.span_tokens = static_cast<uint32_t>(std::min<uint64_t>(options_.decode + 1, limits::kMaxSpanTokens));
  use.span_dtype = options_.span_dtype;
  return use;
}

absl::Status ConversationJob::Prepare() {
  const JobOptions& job = options_.job;
  absl::StatusOr<std::vector<Section>> sections =
      ReadSections(job.docs, {.max_sections = static_cast<size_t>(job.sections)});
  if (!sections.ok()) return sections.status();
  size_t longest = 0;
  for (Chat& chat : MakeChats(*sections, {.chats = options_.conversations,
                                         .turns = options_.turns,
                                         .sections_per_prompt = job.sections_per_prompt,
                                         .seed = job.seed})) {
    size_t tokens = chat.opening.tokens.size();
    for (const std::vector<int32_t>& message : chat.messages) {
      tokens += message.size() + static_cast<size_t>(options_.decode);
    }
    longest = std::max(longest, tokens);
    Conversation conversation(chat.opening);
    tracked_.push_back({.chat = std::move(chat), .conversation = std::move(conversation)});
  }

  const uint64_t all = (uint64_t{2} << 30) + sections->size() * (uint64_t{8} << 20);
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = job.dram_bytes > 0 ? job.dram_bytes : all,
                                           .hbm_bytes = job.hbm_bytes,
                                           .ssd_bytes = job.ssd_bytes,
                                           .admission = "all",  // shows small tiers at work
                                           .threads = static_cast<uint32_t>(pool_.Size())});
  if (!daemon.ok()) return daemon.status();
  daemon_ = std::move(*daemon);
  auto serving = ConversationServing::Open(
      runtime(engine_), {.rpc_socket = daemon_->sockets().rpc_socket,
                         .session_socket = daemon_->sockets().session_socket,
                         .seams = kTurnSeams,
                         // The turn being served, a segment being filled, and composed conversations' sequences.
                         .pages = PagesFor(longest, 2 + tracked_.size() / 2),
                         .compose = job.compose,
                         .epsilon = job.epsilon,
                         .prefixes = Use()});
  if (!serving.ok()) return serving.status();
  ashlar_ = *std::move(serving);
  own_pages_ = std::make_unique<LocalPages>(model_.config(), PagesFor(longest, 1));
  full_ = std::make_unique<FullRecompute>(runtime(full_engine_), own_pages_->pool());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> ConversationJob::WithoutCache(Tracked& tracked, const Turn& turn,
                                                                 std::span<const int32_t> prompt) {
  // States rebuilt from a span are cut at other tokens than in a run without the cache, so their bits differ.
  if (options_.regenerate) return std::vector<float>();
  const uint64_t resumed = turn.set->resumed;
  if (turn.provenance == Provenance::kExact) {
    tracked.cuts.Resume(resumed);
    tracked.cuts.Add(turn.runs);
    return Replay(runtime(engine_), own_pages_->pool(), prompt, tracked.cuts);
  }
  if (tracked.stayed == nullptr) return std::vector<float>();
  // Cut in the same way as if it was resumed.
  const std::vector<int64_t> whole = {static_cast<int64_t>(prompt.size())};
  const bool alike = static_cast<uint64_t>(tracked.stayed->length()) == resumed;
  return RunOn(runtime(engine_), *tracked.stayed, prompt, alike ? turn.runs : whole);
}

absl::Status ConversationJob::FollowDecoding(Tracked& tracked, const Turn& turn) {
  const std::vector<int32_t>& text = tracked.conversation.text.tokens;
  if (turn.provenance == Provenance::kComposed && tracked.stayed == nullptr) {
    tracked.stayed = std::move(turn.set->sequence);
    return absl::OkStatus();
  }
  for (auto end = static_cast<int64_t>(turn.prompt_tokens) + 1; end <= static_cast<int64_t>(text.size()); ++end) {
    const std::vector<int64_t> one = {end};
    if (turn.provenance == Provenance::kExact) {
      tracked.cuts.Add(one);
    } else if (const auto logits = RunOn(runtime(engine_), *tracked.stayed, text, one); !logits.ok()) {
      return logits.status();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ConversationJob::StateError(const Turn& turn, std::span<const int32_t> prompt) {
  Sequence full(model_.config(), own_pages_->pool());
  const refengine::Step step = refengine::Step::Compute(prompt.first(turn.set->resumed));
  if (absl::Status status = full_engine_.Advance(full, {&step, 1}); !status.ok()) return status;
  double worst = 0;
  for (int32_t layer = 0; layer < model_.config().linear_layers(); ++layer) {
    worst = std::max(worst, RelativeL2(turn.set->prefix_state->State(layer), full.recurrent().State(layer)));
  }
  return worst;
}

uint64_t ConversationJob::SavedBytes(const Turn& turn, uint64_t text) const {
  if (turn.outcomes.back() != CommitOutcome::kKeptAsSpan) return 0;
  const Layout layout = model_.layout(kTurnSeams.head, kTurnSeams.tail, kPageTokens);
  const auto span = PlanPrefixSpan(layout, {}, {}, options_.span_dtype, text - turn.span_tokens, text);
  const auto states = PlanPrefixCheckpoint(layout, {}, {}, PrefixBlockTokens(layout), text);
  return span.ok() && states.ok() && states->bytes > span->bytes ? states->bytes - span->bytes : 0;
}

absl::StatusOr<TurnResult> ConversationJob::TakeTurn(Tracked& tracked, size_t number) {
  RagPrompt& text = tracked.conversation.text;
  const std::vector<int32_t>& message = tracked.chat.messages[number];
  if (options_.regenerate && number > 0)
    text.tokens.resize(text.tokens.size() - static_cast<size_t>(options_.decode / 2));
  text.tokens.insert(text.tokens.end(), message.begin(), message.end());
  const absl::StatusOr<Served> full = full_->Serve(text);
  if (!full.ok()) return full.status();
  const absl::StatusOr<Turn> turn = ashlar_->Serve(tracked.conversation, options_.decode);
  if (!turn.ok()) return turn.status();
  const std::vector<float>& logits = turn->served.logits;
  const uint64_t resumed = turn->set->resumed;
  TurnResult result{.turn = static_cast<int64_t>(number) + 1,
                    .composed = turn->provenance == Provenance::kComposed,
                    .tokens = turn->prompt_tokens,
                    .resumed = resumed,
                    .computed_tokens = turn->served.computed_tokens,
                    .ttft_ms = turn->served.ttft_ms,
                    .full_ttft_ms = full->ttft_ms,
                    .flop_floor_speedup = full->flops / turn->served.flops,
                    .full_rel_l2 = RelativeL2(logits, full->logits),
                    .checkpoints_offered = turn->offered.size(),
                    .commit_ms = turn->commit_ms};
  const bool landed = std::ranges::find(turn->set->landed, true) != turn->set->landed.end();
  result.source = turn->own     ? Source::kOwn
                  : landed      ? Source::kSegments
                  : resumed > 0 ? Source::kTree
                                : Source::kNothing;
  for (const CommitOutcome outcome : turn->outcomes) {
    result.kept += outcome == CommitOutcome::kKept || outcome == CommitOutcome::kAlreadyPresent ||
                   outcome == CommitOutcome::kKeptAsSpan;
  }
  result.span_tokens = turn->set->plan().prefix_span_tokens;
  result.saved_bytes = SavedBytes(*turn, text.tokens.size());
  if (result.span_tokens > 0 && !result.composed) {
    const absl::StatusOr<double> error = StateError(*turn, text.tokens);
    if (!error.ok()) return error.status();
    result.state_rel_l2 = *error;
  }
  const auto expected = WithoutCache(tracked, *turn, std::span(text.tokens).first(turn->prompt_tokens));
  if (!expected.ok()) return expected.status();
  if (!expected->empty()) {
    result.logits_rel_l2 = RelativeL2(logits, *expected);
    result.bit_identical = logits == *expected;
  }
  if (options_.regenerate) return result;
  if (const absl::Status status = FollowDecoding(tracked, *turn); !status.ok()) return status;
  return result;
}

absl::StatusOr<ConversationResult> ConversationJob::Run() {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  PrintTurnHeader();
  ConversationResult run{.conversations = options_.conversations, .turns = options_.turns, .threads = pool_.Size()};
  if (options_.regenerate) run.spans = options_.span_dtype;
  // The conversations alternate: each is suspended before its next turn.
  for (int64_t turn = 0; turn < options_.turns; ++turn) {
    for (size_t i = 0; i < tracked_.size(); ++i) {
      absl::StatusOr<TurnResult> result = TakeTurn(tracked_[i], static_cast<size_t>(turn));
      if (!result.ok()) return result.status();
      result->conversation = static_cast<int64_t>(i) + 1;
      PrintTurn(*result);
      run.results.push_back(*std::move(result));
    }
  }
  return run;
}

}  // namespace

absl::StatusOr<ConversationResult> RunConversationJob(const ConversationOptions& options) {
  return ConversationJob(options).Run();
}

}  // namespace ashlar::rag
