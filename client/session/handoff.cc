// SPDX-License-Identifier: Apache-2.0
// Model::Handoff: passes a finished prompt to an engine on another node.
#include <algorithm>

#include "ashlar/v1/cache.pb.h"
#include "client/session/model.h"
#include "client/session/prompt_message.h"
#include "client/session/rpc.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar {
namespace {

// In addition to the other node's time: calls between daemons have their own deadlines.
constexpr std::chrono::seconds kOtherNodesAnswer{6};

}  // namespace

HandoffOutcome Model::Handoff(const CommitParts& text, const std::string& node, std::chrono::milliseconds wait) {
  const absl::StatusOr<internal::ModelBinding> binding = Bind();
  if (!binding.ok() || !internal::CheckProtocol("text", text.media, text.salt, binding->connection->protocol()).ok()) {
    return HandoffOutcome::kUnavailable;
  }
  v1::HandOffRequest request;
  request.set_session(binding->connection->session());
  request.set_model(binding->model->id());
  request.set_tokens(PackTokens(text.tokens));
  if (text.conversation != ConversationId{}) {
    request.set_conversation(text.conversation.data(), text.conversation.size());
  }
  request.set_media(PackMedia(text.media));
  request.set_salt(PackSalt(text.salt));
  request.set_node(node);
  request.set_patience_ms(static_cast<uint32_t>(std::clamp<int64_t>(wait.count(), 1, limits::kMaxPeerPatienceMillis)));
  v1::HandOffReply reply;
  const internal::Deadline deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(request.patience_ms()) + kOtherNodesAnswer;
  const absl::Status status = binding->connection->rpc().HandOff(request, reply, deadline);
  if (absl::IsDeadlineExceeded(status)) return HandoffOutcome::kTimedOut;
  if (absl::IsResourceExhausted(status)) return HandoffOutcome::kBusy;
  const bool known = reply.outcome() >= static_cast<uint32_t>(HandoffOutcome::kCompleted) &&
                     reply.outcome() <= static_cast<uint32_t>(HandoffOutcome::kUnavailable);
  return status.ok() && known ? static_cast<HandoffOutcome>(reply.outcome()) : HandoffOutcome::kUnavailable;
}

}  // namespace ashlar
