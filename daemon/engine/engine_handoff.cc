// SPDX-License-Identifier: Apache-2.0
// HandOff: gives a finished prompt to an engine on another node.
#include <memory>
#include <string>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/request_fields.h"
#include "daemon/peer/offers/prompt_handoff.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::daemon {

void EngineService::HandOff(const v1::HandOffRequest& request, v1::HandOffReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (model->prefixes == nullptr)
    return done(Invalid("model: was opened without prefixes; set prefixes when opening the model"));
  auto tokens = ReadTokens("tokens", request.tokens());
  if (!tokens.ok()) return done(tokens.status());
  if (tokens->empty()) return done(Invalid("tokens: empty"));
  const auto conversation = ReadConversation("conversation", request.conversation());
  if (!conversation.ok()) return done(conversation.status());
  auto media = UnpackMedia("media", request.media(), tokens->size());
  if (!media.ok()) return done(media.status());
  const auto salt = UnpackSalt("salt", request.salt());
  if (!salt.ok()) return done(salt.status());
  if (request.node().empty() || request.node().size() > limits::kMaxPeerNameBytes) {
    return done(Invalid("node: wrong length; expected 1 to ", limits::kMaxPeerNameBytes, " bytes"));
  }
  if (request.patience_ms() == 0 || request.patience_ms() > limits::kMaxPeerPatienceMillis) {
    return done(Invalid("patience_ms: out of range; expected 1 to ", limits::kMaxPeerPatienceMillis));
  }
  const auto answer = [reply, done](const PromptHandoff::Result& result) {
    reply->set_outcome(static_cast<uint32_t>(result.outcome));
    reply->set_bytes(result.bytes);
    done(absl::OkStatus());
  };
  if (!handoff_) return answer({.outcome = HandoffOutcome::kUnavailable});
  const auto text = std::make_shared<const storage::PrefixText>(model->prefixes, *std::move(tokens), *conversation,
                                                                *std::move(media), *salt);
  sessions_.OnLoop(
      *session, CallClass::kRequest, done,
      [this, tenant = (*session)->about().tenant, text, node = request.node(), patience = request.patience_ms(),
       answer] { handoff_().Start(tenant, *text, node, patience, answer); });
}

}  // namespace ashlar::daemon
