#include "examples/talk/conversation_serving.h"

#include <algorithm>
#include <random>

#include "examples/rag/resumed_state.h"

namespace ashlar::talk {

using rag::SetPrompt;
using refengine::Step;

Conversation::Conversation(rag::RagPrompt text) : text(std::move(text)) {
  std::random_device random;
  std::ranges::generate(id, [&] { return static_cast<uint8_t>(random()); });
}

absl::StatusOr<std::unique_ptr<ConversationServing>> ConversationServing::Open(
    Client& client, const rag::Runtime& runtime, refengine::PagePool& pool, const Region& region,
    refengine::SeamWidths seams, const rag::ServingOptions& options) {
  const refengine::ModelConfig& config = runtime.model.config();
  if (options.prefixes.capture_tokens == 0) return absl::InvalidArgumentError("options.prefixes: not in use");
  const uint64_t span_tokens = options.prefixes.span_tokens;
  if (region.size() < RegionBytes(config, pool.page_tokens(), pool.pages(), span_tokens)) {
    return absl::InvalidArgumentError("region: smaller than RegionBytes");
  }
  auto serving = rag::CachedServing::Open(client, runtime, pool, region, seams, options);
  if (!serving.ok()) return serving.status();
  std::unique_ptr<ConversationServing> opened(new ConversationServing(runtime, region, *std::move(serving)));
  for (size_t i = 0; i < kCheckpoints; ++i) opened->staging_.emplace_back(config, pool, region, 1 + i);
  if (span_tokens > 0) {
    std::byte* const at = region.data() + RegionBytes(config, pool.page_tokens(), pool.pages());
    opened->span_tokens_ = span_tokens;
    opened->span_staging_ = std::make_unique<SpanStaging>(config, at, span_tokens, options.prefixes.span_dtype);
    opened->serving_->Record(&opened->span_staging_->tape());
  }
  return opened;
}

absl::StatusOr<Turn> ConversationServing::Serve(Conversation& conversation, int64_t decode) {
  std::vector<int32_t>& text = conversation.text.tokens;
  Turn turn{.prompt_tokens = text.size()};
  text.reserve(text.size() + decode);  // the chain points into it
  if (span_staging_ != nullptr) span_staging_->Begin(turn.prompt_tokens - 1);
  absl::StatusOr<rag::Served> served = serving_->Serve(conversation.text, conversation.id);
  if (!served.ok()) return served.status();
  SetPrompt& set = serving_->last();
  turn.set = &set;
  turn.own = set.resumed > 0 && set.match->prefix().own;
  if (set.resumed > 0) turn.provenance = set.match->prefix().provenance;
  // The first segment is a prefix, and exact.
  for (size_t i = 1; i < set.landed.size(); ++i) {
    if (set.landed[i]) turn.provenance = Provenance::kComposed;
  }
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
  const rag::Stopwatch watch;
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

std::optional<refengine::RecurrentState> ConversationServing::BeforeLastToken(const Turn& turn) {
  const SetPrompt& set = *turn.set;
  if (span_staging_ == nullptr || set.resumed == 0 || set.resumed != turn.prompt_tokens - 1) return std::nullopt;
  if (set.rebuilt) return set.rebuilt->state();
  refengine::RecurrentState state = rag::ResumedState(runtime_, serving_->model().layout(), *set.match);
  return set.match->valid() ? std::optional(std::move(state)) : std::nullopt;
}

void ConversationServing::Commit(const Conversation& conversation, Turn& turn) {
  const SetPrompt& set = *turn.set;
  CommitParts parts{.tokens = conversation.text.tokens,
                    .prompt_tokens = turn.prompt_tokens,
                    .provenance = turn.provenance,
                    .region = region_,
                    .page_table = set.sequence->page_table(),
                    .conversation = conversation.id};
  const auto offer = [&](uint64_t depth, const refengine::RecurrentState& state) {
    rag::Staging& staging = staging_[parts.checkpoints.size()];
    staging.Take(state);
    parts.checkpoints.push_back({.depth = depth, .linear = staging.Parts()});
    turn.offered.push_back(depth);
  };
  for (const refengine::Snapshot& snapshot : set.snapshots) {
    const auto depth = static_cast<uint64_t>(snapshot.depth);
    if (depth < parts.tokens.size() && parts.checkpoints.size() + 1 < kCheckpoints) offer(depth, snapshot.state);
  }
  const uint64_t before = turn.prompt_tokens - 1, computed = parts.tokens.size() - before;
  if (const auto state = BeforeLastToken(turn)) offer(before, *state);
  const bool based = !turn.offered.empty() && turn.offered.back() == before;
  if (based && computed > 1 && computed <= span_tokens_) {
    parts.span = span_staging_->Take(computed);
    turn.span_tokens = computed;
  }
  offer(parts.tokens.size(), set.sequence->recurrent());
  turn.outcomes = serving_->model().Commit(&*set.match, parts);
}

}  // namespace ashlar::talk
