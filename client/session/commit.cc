// SPDX-License-Identifier: Apache-2.0
// Model::Commit: offers a text's states to the cache, so that other prompts can resume from them.
#include <algorithm>
#include <optional>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/lending_call.h"
#include "client/session/model.h"
#include "client/session/part_sources.h"
#include "client/session/prompt_message.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;

CommitOutcome ToCommitOutcome(uint32_t wire) {
  const bool known =
      wire >= static_cast<uint32_t>(CommitOutcome::kKept) && wire <= static_cast<uint32_t>(CommitOutcome::kKeptAsSpan);
  return known ? static_cast<CommitOutcome>(wire) : CommitOutcome::kUnavailable;
}

CommitOutcome ToCommitOutcome(const absl::Status& status) {
  if (absl::IsInvalidArgument(status)) return CommitOutcome::kBadSource;
  if (absl::IsResourceExhausted(status)) return CommitOutcome::kBusy;
  return CommitOutcome::kUnavailable;
}

// INVALID_ARGUMENT: the states do not fit the layout, or are not in the region. RESOURCE_EXHAUSTED: the daemon has no
// space for the region or the pages now.
absl::StatusOr<v1::CommitRequest> DescribeText(const CommitParts& text, const Layout& layout,
                                               const ModelBinding& binding, const PrefixUse& use,
                                               const internal::RegionMemory* region) {
  v1::CommitRequest request;
  request.set_model(binding.model->id());
  request.set_tokens(PackTokens(text.tokens));
  if (const absl::Status fits = internal::CheckProtocol("text", text.media, text.salt, binding.connection->protocol());
      !fits.ok()) {
    return absl::UnavailableError(fits.message());  // the sources are valid: kUnavailable, not kBadSource
  }
  request.set_media(PackMedia(text.media));
  request.set_salt(PackSalt(text.salt));
  // A daemon of an earlier protocol cannot commit a text that is the first part of a prompt.
  const bool goes_on = binding.connection->protocol() >= limits::kProtocolWithSalt;
  request.set_prompt_tokens(goes_on ? text.prompt_tokens : std::min<uint64_t>(text.prompt_tokens, text.tokens.size()));
  request.set_provenance(static_cast<uint32_t>(text.provenance));
  if (text.conversation != ConversationId{}) {
    request.set_conversation(text.conversation.data(), text.conversation.size());
  }
  if (binding.pages_missing)
    return absl::ResourceExhaustedError("pages: the daemon has no memory for these pages now; try again later");
  request.set_pages_id(binding.pages_id);
  request.mutable_page_table()->Add(text.page_table.begin(), text.page_table.end());
  request.mutable_group_pages()->Add(text.group_pages.begin(), text.group_pages.end());
  std::optional<internal::PartSources> sources;  // a model with only attention has no states
  if (region != nullptr) {
    const std::optional<uint64_t> region_id = region->IdOn(*binding.connection);
    if (!region_id.has_value())
      return absl::ResourceExhaustedError("region: the daemon has no memory for this region now; try again later");
    sources.emplace(layout, *region, *region_id);
  }
  for (const CapturedState& captured : text.checkpoints) {
    v1::CapturedState* out = request.add_checkpoints();
    out->set_depth(captured.depth);
    const bool inside = std::ranges::all_of(captured.linear, [&](const PublishParts::Linear& tensors) {
      return sources.has_value() && sources->Add(tensors, *out->mutable_parts());
    });
    if (!inside) return absl::InvalidArgumentError("checkpoints: expected states of the layout, inside the region");
  }
  if (!text.span.linear.empty()) {
    if (text.span.begin >= text.tokens.size())
      return absl::InvalidArgumentError("span.begin: out of range; expected less than the number of tokens");
    v1::CapturedSpan* out = request.mutable_span();
    out->set_begin(text.span.begin);
    const bool inside = std::ranges::all_of(text.span.linear, [&](const CapturedSpan::Linear& rows) {
      return sources.has_value() &&
             sources->Add(rows, text.tokens.size() - text.span.begin, use.span_dtype, *out->mutable_parts());
    });
    if (!inside) return absl::InvalidArgumentError("span: expected rows of the layout, inside the region");
  }
  if (request.ByteSizeLong() > limits::kMaxRequestBytes)
    return absl::InvalidArgumentError("text: too large for one message");
  return request;
}

}  // namespace

std::vector<CommitOutcome> Model::Commit(const Match* match, const CommitParts& text) {
  const Deadline deadline = reconnector_->CallDeadline();
  const auto all = [&](const absl::Status& status) {
    return std::vector<CommitOutcome>(text.checkpoints.size(), ToCommitOutcome(status));
  };
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return all(absl::UnavailableError("not connected"));
  auto request = DescribeText(text, layout(), *binding, opened_->prefixes(), text.region.memory_.get());
  if (!request.ok()) return all(request.status());
  // The daemon keeps the text's prefix until it has answered. A match of another session does not count.
  std::shared_ptr<internal::LeaseHold> lease;
  if (match != nullptr && match->connection_ == binding->connection) lease = match->lease_;
  if (lease != nullptr) request->set_lease(lease->lease());
  v1::CommitReply reply;
  const absl::Status status =
      internal::CallLending(*binding->connection, &internal::Rpc::Commit, *request, reply, deadline);
  if (!status.ok()) return all(status);
  if (static_cast<size_t>(reply.outcomes_size()) != text.checkpoints.size()) {
    return all(absl::InternalError("the daemon's reply has the wrong number of checkpoints"));
  }
  std::vector<CommitOutcome> outcomes;
  for (const uint32_t outcome : reply.outcomes()) outcomes.push_back(ToCommitOutcome(outcome));
  return outcomes;
}

}  // namespace ashlar
