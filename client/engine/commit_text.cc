// SPDX-License-Identifier: Apache-2.0
#include "client/engine/commit_text.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "client/engine/describe.h"
#include "client/engine/near_memory.h"
#include "client/engine/prompt_run.h"
#include "client/engine/status.h"
#include "client/engine/tensors.h"
#include "kernels/convert.h"
#include "proto/limits.h"
#include "proto/object.h"

namespace ashlar::engine {
namespace {

std::span<const Checkpoint> CheckpointsOf(const Text& text) {
  return {text.checkpoints, text.checkpoint_count};
}

Status CheckSpan(const CacheState& cache, const Text& text, const std::string& field) {
  if (text.span_count == 0) return {};
  if (text.span == nullptr) return Invalid(field, ".span: null");
  if (text.span_begin == 0 || text.span_begin >= text.token_count) {
    return Invalid(field, ".span_begin: ", text.span_begin, " is out of range; the text has ", text.token_count,
                   " tokens");
  }
  if (text.token_count - text.span_begin > cache.prefixes.span_tokens) {
    return Invalid(field, ".span_begin: ", text.token_count - text.span_begin,
                   " tokens; the cache was opened with span_tokens ", cache.prefixes.span_tokens);
  }
  uint32_t given = 0;
  for (uint32_t layer = 0; layer < cache.layout().layers.size(); ++layer) {
    const auto* const linear = std::get_if<LinearLayer>(&cache.layout().layers[layer]);
    if (linear == nullptr) continue;
    if (given == text.span_count) return Invalid(field, ".span_count: layer ", layer, " is missing");
    const SpanRows& rows = text.span[given];
    const std::string at = absl::StrCat(field, ".span[", given++, "]");
    const SpanRowBytes bytes = SpanRowBytesOf(*linear, DType::kF32);
    if (rows.layer != layer) return Invalid(at, ".layer: ", rows.layer, "; expected ", layer);
    if (rows.keys == nullptr && bytes.keys > 0) return Invalid(at, ".keys: null");
    if (rows.values == nullptr && bytes.values > 0) return Invalid(at, ".values: null");
    if (rows.gates == nullptr && bytes.gates > 0) return Invalid(at, ".gates: null");
    if (rows.betas == nullptr && bytes.betas > 0) return Invalid(at, ".betas: null");
    if (rows.conv_inputs == nullptr && bytes.conv_inputs > 0) return Invalid(at, ".conv_inputs: null");
    if (Status near = CheckNear(cache.region, rows, at); !near.ok()) return near;
  }
  if (given < text.span_count)
    return Invalid(field, ".span_count: ", text.span_count, "; the model has ", given, " linear layers");
  return {};
}

// The places and types of a span's rows in the published form (PartForm): 16 bits if the layout's states have 16.
class SpanCopy {
 public:
  SpanCopy(const CacheState& cache, uint64_t tokens) : cache_(cache), tokens_(tokens) {}

  uint64_t Bytes() const {
    uint64_t bytes = 0;
    ForLinear([&](uint32_t, const LinearLayer& linear) {
      const SpanRowBytes rows = SpanRowBytesOf(linear, cache_.prefixes.span_dtype);
      for (const uint64_t row : {rows.keys, rows.values, rows.gates, rows.betas, rows.conv_inputs}) {
        bytes += Staging::Align(tokens_ * row);
      }
    });
    return bytes;
  }

  CapturedSpan Stage(const Text& text, Staging::Held& held) const {
    CapturedSpan span{.begin = text.span_begin, .linear = {}};
    const SpanRows* from = text.span;
    const DType dtype = cache_.prefixes.span_dtype;
    ForLinear([&](uint32_t layer, const LinearLayer& linear) {
      const SpanRowBytes rows = SpanRowBytesOf(linear, dtype);
      const auto f32 = DType::kF32;
      span.linear.push_back({.layer = layer,
                             .keys = Place(from->keys, rows.keys, dtype, held),
                             .values = Place(from->values, rows.values, dtype, held),
                             .gates = reinterpret_cast<const float*>(Place(from->gates, rows.gates, f32, held)),
                             .betas = reinterpret_cast<const float*>(Place(from->betas, rows.betas, f32, held)),
                             .conv_inputs = Place(from->conv_inputs, rows.conv_inputs, ConvType(linear), held)});
      ++from;
    });
    return span;
  }

 private:
  template <typename Each>
  void ForLinear(Each each) const {
    for (uint32_t layer = 0; layer < cache_.layout().layers.size(); ++layer) {
      const auto* const linear = std::get_if<LinearLayer>(&cache_.layout().layers[layer]);
      if (linear != nullptr) each(layer, *linear);
    }
  }

  std::byte* Place(const float* rows, uint64_t row_bytes, DType dtype, Staging::Held& held) const {
    if (row_bytes == 0) return nullptr;
    std::byte* const placed = held.Take(tokens_ * row_bytes);
    const uint64_t numbers = tokens_ * row_bytes / ElementBytes(dtype);
    kernels::WriteElements(dtype, placed, rows, numbers);
    return placed;
  }

  const CacheState& cache_;
  const uint64_t tokens_;
};

CommitOutcome OutcomeOf(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? CommitOutcome::kBusy : CommitOutcome::kUnavailable;
}

}  // namespace

Status CheckHandoff(const CacheState& cache, const Text& text, const char* node) {
  if (cache.prefixes.capture_tokens == 0) {
    return MakeStatus(Code::kFailedPrecondition, "the cache was opened without capture_tokens");
  }
  if (text.tokens == nullptr || text.token_count == 0) return Invalid("text.tokens: empty");
  if (text.token_count > limits::kMaxPromptTokens)
    return Invalid("text.token_count: out of range; expected at most ", limits::kMaxPromptTokens);
  const auto media = DescribeMedia(text.media, text.media_count, text.token_count, "text.media");
  if (!media.ok()) return ToStatus(media.status());
  const auto salt = DescribeSalt(text.salt, text.salt_bytes, "text.salt");
  if (!salt.ok()) return ToStatus(salt.status());
  const size_t name = node == nullptr ? 0 : std::strlen(node);
  if (name == 0 || name > limits::kMaxPeerNameBytes)
    return Invalid("node: expected a name of 1 to ", limits::kMaxPeerNameBytes, " bytes");
  return {};
}

HandedText::HandedText(const Text& text, const char* its_node) : tokens(text.tokens, text.token_count), node(its_node) {
  std::ranges::copy(text.conversation, conversation.begin());
  const auto described = DescribeMedia(text.media, text.media_count, text.token_count, "text.media");
  if (described.ok()) media = *described;  // it has been checked
  salt = MakeSalt({static_cast<const char*>(text.salt), text.salt_bytes});
}

HandoffOutcome HandTextOff(CacheState& cache, const HandedText& text, std::chrono::milliseconds wait) {
  CommitParts parts{.tokens = text.tokens};
  parts.conversation = text.conversation;
  parts.media = text.media;
  parts.salt = text.salt;
  return cache.model.Handoff(parts, text.node, wait);
}

Status CheckText(CacheState& cache, const Text& text, const std::string& field) {
  if (cache.prefixes.capture_tokens == 0) {
    return MakeStatus(Code::kFailedPrecondition, "the cache was opened without capture_tokens");
  }
  if (text.tokens == nullptr || text.token_count == 0) return Invalid(field, ".tokens: empty");
  if (text.prompt_tokens > limits::kMaxPromptTokens) {
    return Invalid(field, ".prompt_tokens: out of range; expected at most ", limits::kMaxPromptTokens);
  }
  if (text.checkpoints == nullptr || text.checkpoint_count == 0) return Invalid(field, ".checkpoints: empty");
  if (text.outcomes == nullptr) return Invalid(field, ".outcomes: null");
  const auto media = DescribeMedia(text.media, text.media_count, text.token_count, field + ".media");
  if (!media.ok()) return ToStatus(media.status());
  const auto salt = DescribeSalt(text.salt, text.salt_bytes, field + ".salt");
  if (!salt.ok()) return ToStatus(salt.status());
  if (text.checkpoint_count > limits::kMaxCheckpointsPerCommit) {
    return Invalid(field, ".checkpoint_count: out of range; expected at most ", limits::kMaxCheckpointsPerCommit);
  }
  if (Status status = CheckTables(cache.groups, PagesOf(text), field); !status.ok()) return status;
  if (Status status = CheckNotKept(cache.groups, PagesOf(text), cache.quarantine, field); !status.ok()) return status;
  if (cache.has_pages()) {
    Status status = CheckReach(cache.groups, PagesOf(text), 0, text.token_count, field);
    if (!status.ok()) return status;
  }
  uint64_t before = 0;
  for (uint32_t i = 0; i < text.checkpoint_count; ++i) {
    const Checkpoint& checkpoint = text.checkpoints[i];
    const std::string at = absl::StrCat(field, ".checkpoints[", i, "]");
    if (checkpoint.depth <= before) return Invalid(at, ".depth: ", checkpoint.depth, "; expected more than ", before);
    if (checkpoint.linear == nullptr && checkpoint.linear_count > 0) return Invalid(at, ".linear: null");
    Status status =
        CheckTensors(cache.layout(), cache.region, {checkpoint.linear, checkpoint.linear_count}, false, at + ".linear");
    if (!status.ok()) return status;
    before = checkpoint.depth;
  }
  if (before != text.token_count) {
    return Invalid(field, ".checkpoints[", text.checkpoint_count - 1, "].depth: ", before,
                   "; expected the text's token_count, ", text.token_count);
  }
  return CheckSpan(cache, text, field);
}

void SetOutcomes(const Text& text, CommitOutcome outcome) {
  std::fill_n(text.outcomes, text.checkpoint_count, static_cast<uint8_t>(outcome));
}

CommittedText::CommittedText(const Text& given, std::shared_ptr<PromptRun> its_began)
    : text(given),
      began(std::move(its_began)),
      pages(GroupedPages::From(PagesOf(given))),
      checkpoints_(given.checkpoints, given.checkpoints + given.checkpoint_count),
      span_(given.span, given.span + given.span_count) {
  exact = !given.composed && (began == nullptr || began->plan().exact().value_or(false));
  under_lease = began == nullptr || began->plan().uses_all();
  for (Checkpoint& checkpoint : checkpoints_) {
    linear_.emplace_back(checkpoint.linear, checkpoint.linear + checkpoint.linear_count);
    checkpoint.linear = linear_.back().data();
  }
  const auto described = DescribeMedia(given.media, given.media_count, given.token_count, "media");
  if (described.ok()) media = *described;  // it has been checked
  salt = MakeSalt({static_cast<const char*>(given.salt), given.salt_bytes});
  text.salt = nullptr;
  text.checkpoints = checkpoints_.data();
  text.page_table = nullptr;
  text.page_tables = nullptr;
  text.span = span_.data();
  if (began != nullptr) began->match().BeginCommit();
}

CommittedText::~CommittedText() {
  if (began != nullptr) began->match().EndCommit();
}

void CommitText(CacheState& cache, const CommittedText& committed) {
  const Text& text = committed.text;
  CommitParts parts{.tokens = {text.tokens, text.token_count},
                    .prompt_tokens = text.prompt_tokens,
                    .provenance = committed.exact ? Provenance::kExact : Provenance::kComposed,
                    .checkpoints = {},
                    .span = {},
                    .region = cache.region,
                    .page_table = committed.pages.entries};
  parts.group_pages = committed.pages.group_pages;
  std::ranges::copy(text.conversation, parts.conversation.begin());
  parts.media = committed.media;
  parts.salt = committed.salt;
  bool staged = text.span_count > 0;
  uint64_t bytes = 0;
  for (const Checkpoint& checkpoint : CheckpointsOf(text)) {
    const std::span<const LinearTensors> linear(checkpoint.linear, checkpoint.linear_count);
    staged |= !LieIn(cache.region, cache.layout(), linear);
    for (const LinearTensors& tensors : linear) {
      bytes += TensorBytes(cache.layout().layers[tensors.layer]).staged(false);
    }
  }
  const SpanCopy span(cache, text.token_count - text.span_begin);
  std::optional<Staging::Held> held;
  if (staged) {
    absl::StatusOr<Staging::Held> space = cache.staging.Hold(bytes + (text.span_count > 0 ? span.Bytes() : 0));
    if (!space.ok()) return SetOutcomes(text, OutcomeOf(space.status()));
    held.emplace(*std::move(space));
    parts.region = held->region();
  }
  for (const Checkpoint& checkpoint : CheckpointsOf(text)) {
    const std::span<const LinearTensors> linear(checkpoint.linear, checkpoint.linear_count);
    parts.checkpoints.push_back({checkpoint.depth, staged ? Stage(cache.layout(), linear, *held) : InPlace(linear)});
  }
  if (text.span_count > 0) parts.span = span.Stage(text, *held);
  const bool lease = committed.began != nullptr && committed.under_lease;
  const ashlar::Match* const match = lease ? committed.began->match().get() : nullptr;
  const std::vector<CommitOutcome> outcomes = cache.model.Commit(match, parts);
  for (size_t i = 0; i < outcomes.size(); ++i) text.outcomes[i] = static_cast<uint8_t>(outcomes[i]);
}

}  // namespace ashlar::engine
