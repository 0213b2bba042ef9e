// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/conversation_serving.h"

#include <algorithm>
#include <random>

namespace ashlar::rag {

using refengine::Step;

Conversation::Conversation(RagPrompt its_text) : text(std::move(its_text)) {
  std::random_device random;
  std::ranges::generate(id, [&] { return static_cast<uint8_t>(random()); });
}

absl::StatusOr<std::unique_ptr<ConversationServing>> ConversationServing::Open(const Runtime& runtime,
                                                                               const ServingOptions& options) {
  if (options.prefixes.capture_tokens == 0) return absl::InvalidArgumentError("options.prefixes: not in use");
  auto serving = CachedServing::Open(runtime, options);
  if (!serving.ok()) return serving.status();
  std::unique_ptr<ConversationServing> opened(new ConversationServing(runtime, *std::move(serving)));
  if (options.prefixes.span_tokens > 0) {
    opened->span_tokens_ = options.prefixes.span_tokens;
    opened->span_staging_ = std::make_unique<SpanStaging>(runtime.model.config(), opened->span_tokens_);
    opened->serving_->Record(&opened->span_staging_->tape());
  }
  return opened;
}

absl::StatusOr<Turn> ConversationServing::Serve(Conversation& conversation, int64_t decode) {
  std::vector<int32_t>& text = conversation.text.tokens;
  Turn turn{.prompt_tokens = text.size()};
  text.reserve(text.size() + decode);  // the chain points into it
  if (span_staging_ != nullptr) span_staging_->Begin(turn.prompt_tokens - 1);
  absl::StatusOr<Served> served = serving_->Serve(conversation.text, conversation.id);
  if (!served.ok()) return served.status();
  SetPrompt& set = serving_->last();
  turn.set = &set;
  turn.own = set.plan().own;
  turn.provenance = set.plan().exact ? Provenance::kExact : Provenance::kComposed;
  int64_t position = 0;
  for (const Step& step : set.chain) {
    position += step.count();
    if (step.cached.empty()) turn.runs.push_back(position);
  }
  if (absl::Status status = Decode(text, decode, served->logits); !status.ok()) {
    text.resize(turn.prompt_tokens);
    return status;
  }
  turn.served = *std::move(served);
  const Stopwatch watch;
  Commit(conversation, turn);
  turn.commit_ms = watch.Milliseconds();
  return turn;
}

absl::Status ConversationServing::Decode(std::vector<int32_t>& text, int64_t count, std::vector<float> logits) {
  for (int64_t i = 0; i < count; ++i) {
    text.push_back(refengine::GreedyToken(logits));
    const Step step = Step::Compute({&text.back(), 1});
    const absl::Status status = runtime_.engine.Advance(
        *serving_->last().sequence, {&step, 1},
        {.last_logits = logits.data(), .tape = span_staging_ == nullptr ? nullptr : &span_staging_->tape()});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void ConversationServing::Commit(const Conversation& conversation, Turn& turn) {
  const SetPrompt& set = *turn.set;
  const std::vector<int32_t>&tokens = conversation.text.tokens, &pages = set.sequence->page_table();
  std::vector<std::vector<engine::LinearTensors>> tensors;
  const auto offer = [&](uint64_t depth, const refengine::RecurrentState& state) {
    tensors.push_back(TensorsOf(runtime_.model.config(), state));
    turn.offered.push_back(depth);
  };
  for (const refengine::Snapshot& snapshot : set.snapshots) {
    const auto depth = static_cast<uint64_t>(snapshot.depth);
    if (depth < tokens.size() && tensors.size() + 1 < kCheckpoints) offer(depth, snapshot.state);
  }
  const uint64_t before = turn.prompt_tokens - 1, computed = tokens.size() - before;
  // A span begins at the states before the prompt's last token.
  if (span_staging_ != nullptr && set.resumed == before && set.prefix_state) offer(before, *set.prefix_state);
  const bool based = !turn.offered.empty() && turn.offered.back() == before;
  if (based && computed > 1 && computed <= span_tokens_) turn.span_tokens = computed;
  offer(tokens.size(), set.sequence->recurrent());

  std::vector<engine::Checkpoint> checkpoints;
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkpoints.push_back({turn.offered[i], tensors[i].data(), static_cast<uint32_t>(tensors[i].size())});
  }
  std::vector<uint8_t> outcomes(checkpoints.size());
  engine::Text text{.request = &set.request,
                    .tokens = tokens.data(),
                    .token_count = tokens.size(),
                    .prompt_tokens = turn.prompt_tokens,
                    .checkpoints = checkpoints.data(),
                    .checkpoint_count = static_cast<uint32_t>(checkpoints.size()),
                    .page_table = pages.data(),
                    .page_count = pages.size(),
                    .outcomes = outcomes.data()};
  std::ranges::copy(conversation.id, text.conversation);
  if (turn.span_tokens > 0) {
    text.span_begin = before;
    text.span = span_staging_->rows().data();
    text.span_count = static_cast<uint32_t>(span_staging_->rows().size());
  }
  serving_->cache().Commit(&text, 1);
  for (const uint8_t outcome : outcomes) turn.outcomes.push_back(static_cast<CommitOutcome>(outcome));
}

absl::Status ConversationServing::Handoff(const Conversation& conversation, const std::string& node,
                                          std::chrono::milliseconds wait) {
  const std::vector<int32_t>& tokens = conversation.text.tokens;
  engine::Text text{.tokens = tokens.data(), .token_count = tokens.size()};
  std::ranges::copy(conversation.id, text.conversation);
  const engine::Status handed = serving_->cache().Handoff(text, node.c_str(), static_cast<uint32_t>(wait.count()));
  return handed.ok() ? absl::OkStatus() : absl::UnavailableError(handed.message);
}

}  // namespace ashlar::rag
