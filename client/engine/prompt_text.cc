// SPDX-License-Identifier: Apache-2.0
#include "client/engine/prompt_text.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "client/engine/describe.h"
#include "client/engine/status.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

std::string FieldOf(const std::string& field, const char* name) {
  return absl::StrCat(field, ".", name);
}

Status CheckPointer(const void* pointer, uint64_t count, const std::string& field) {
  return pointer == nullptr && count > 0 ? Invalid(field, ": null") : Status();
}

}  // namespace

Status PromptText::Take(const CacheState& cache, const Prompt& prompt, const std::string& field) {
  Status status = CheckPointer(prompt.tokens, prompt.token_count, FieldOf(field, "tokens"));
  if (status.ok()) {
    status = CheckPointer(prompt.segment_lengths, prompt.segment_count, FieldOf(field, "segment_lengths"));
  }
  if (!status.ok()) return status;
  if (prompt.token_count > limits::kMaxPromptTokens) {
    return Invalid(field, ".token_count: out of range; expected at most ", limits::kMaxPromptTokens);
  }
  if (prompt.segment_count > 0) {
    if (const absl::Status composable = CheckComposable(cache.layout()); !composable.ok())
      return MakeStatus(Code::kInvalidArgument, absl::StrCat(field, ".segment_lengths: ", composable.message()));
  }
  if (prompt.segment_count > limits::kMaxSegments) {
    return Invalid(field, ".segment_count: out of range; expected at most ", limits::kMaxSegments);
  }
  tokens_ = {prompt.tokens, prompt.token_count};
  token_count_ = prompt.token_count;
  lengths_.assign(prompt.segment_lengths, prompt.segment_lengths + prompt.segment_count);
  uint64_t end = 0;
  for (size_t i = 0; i < lengths_.size(); end += lengths_[i++]) {
    if (lengths_[i] == 0 || lengths_[i] > token_count_ - end) {
      return Invalid(field, ".segment_lengths[", i, "]: ", lengths_[i], " is out of range; ", token_count_ - end,
                     " tokens are left");
    }
  }
  if (!lengths_.empty() && end == token_count_) {
    return Invalid(field,
                   ".segment_lengths: the segments cover the whole prompt; leave at least its last token outside");
  }
  status = TakeShifts(cache, prompt.rotary_shifts, prompt.segment_count, field);
  if (!status.ok()) return status;
  if (prompt.needed_in_ms > limits::kMaxNeededInNanos / 1'000'000)
    return Invalid(field, ".needed_in_ms: out of range; expected at most ", limits::kMaxNeededInNanos / 1'000'000);
  absl::StatusOr<std::vector<MediaHash>> media =
      DescribeMedia(prompt.media, prompt.media_count, token_count_, FieldOf(field, "media"));
  if (!media.ok()) return ToStatus(media.status());
  media_ = *std::move(media);
  const absl::StatusOr<Salt> salt = DescribeSalt(prompt.salt, prompt.salt_bytes, FieldOf(field, "salt"));
  if (!salt.ok()) return ToStatus(salt.status());
  salt_ = *salt;
  begun_ = true;
  needed_in_ = std::chrono::milliseconds(prompt.needed_in_ms);
  std::ranges::copy(prompt.conversation, conversation_.begin());
  return {};
}

Status PromptText::Take(const CacheState& cache, const PlanToLand& plan, const std::string& field) {
  if (plan.plan == nullptr) return Invalid(field, ".plan: null");
  absl::StatusOr<PlannedLanding> decoded = DecodePlan({plan.plan, plan.plan_bytes});
  if (!decoded.ok()) return Invalid(field, ".", decoded.status().message());
  if (decoded->ns != cache.model.ns())
    return Invalid(field, ".namespace: differs from this cache's; expected the same model, layout and tenant");
  if (decoded->tensor_parallel_size != cache.tensor_parallel_size) {
    return Invalid(field, ".tensor_parallel_size: ", decoded->tensor_parallel_size, "; this model was opened with ",
                   cache.tensor_parallel_size);
  }
  if (plan.present_tokens > decoded->tokens) {
    return Invalid(field, ".present_tokens: ", plan.present_tokens, "; the prompt has ", decoded->tokens);
  }
  if (cache.shares_in_place) return Invalid(field, ".plan: the daemon allocates the pages of this cache; use Begin");
  token_count_ = decoded->tokens;
  lengths_ = decoded->segment_lengths;
  planned_ = *std::move(decoded);
  present_tokens_ = plan.present_tokens;
  return TakeShifts(cache, plan.rotary_shifts, plan.rotary_shift_count, field);
}

void PromptText::Take(std::vector<int32_t> tokens) {
  own_tokens_ = std::move(tokens);
  tokens_ = own_tokens_;
  token_count_ = tokens_.size();
}

Status PromptText::TakeShifts(const CacheState& cache, const int64_t* shifts, uint64_t count,
                              const std::string& field) {
  rotary_shifts_.assign(lengths_.size(), 0);
  if (shifts == nullptr) return {};
  if (count != lengths_.size()) {
    return Invalid(field, ".rotary_shift_count: ", count, "; expected ", lengths_.size(), " (one per segment)");
  }
  rotary_shifts_.assign(shifts, shifts + count);
  if (!shifted()) return {};
  if (shifts[0] != 0) return Invalid(field, ".rotary_shifts[0]: ", shifts[0], "; expected 0");
  uint64_t start = 0;
  for (size_t i = 0; i < count; start += lengths_[i++]) {
    if (shifts[i] < -static_cast<int64_t>(start)) {
      return Invalid(field, ".rotary_shifts[", i, "]: ", shifts[i], " is out of range; expected at least -", start,
                     ", minus the segment's first position");
    }
  }
  if (cache.shares_in_place) return Invalid(field, ".rotary_shifts: not allowed with memory.share_in_place");
  const auto rotates = [](const ashlar::Layer& layer) {
    const auto* const linear = std::get_if<LinearLayer>(&layer);
    return linear != nullptr && linear->rope.kind != RopeStyle::kNone;
  };
  if (std::ranges::any_of(cache.layout().layers, rotates)) {
    return Invalid(field, ".rotary_shifts: not allowed for models whose linear layers rotate keys");
  }
  return {};
}

bool PromptText::shifted() const {
  return std::ranges::any_of(rotary_shifts_, [](int64_t shift) { return shift != 0; });
}

void PromptText::OwnTokens() {
  if (tokens_.data() == own_tokens_.data()) return;
  own_tokens_.assign(tokens_.begin(), tokens_.end());
  tokens_ = own_tokens_;
}

ashlar::Prompt PromptText::Asked() const {
  return {.tokens = tokens_,
          .segment_lengths = lengths_,
          .needed_in = needed_in_,
          .conversation = conversation_,
          .media = media_,
          .salt = salt_};
}

}  // namespace ashlar::engine
