// SPDX-License-Identifier: Apache-2.0
#include "client/session/prompt_message.h"

#include <sys/random.h>

#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::internal {

bool FitsMessage(const Prompt& prompt, uint32_t protocol) {
  return prompt.tokens.size() <= limits::kMaxPromptTokens && prompt.segment_lengths.size() <= limits::kMaxSegments &&
         FitsProtocol(prompt.media, prompt.salt, protocol);
}

bool FitsProtocol(std::span<const MediaHash> media, const Salt& salt, uint32_t protocol) {
  return media.size() <= limits::kMaxMedia && (media.empty() || protocol >= limits::kProtocolWithMedia) &&
         (salt == Salt{} || protocol >= limits::kProtocolWithSalt);
}

void Describe(const Prompt& prompt, bool uses_prefixes, v1::Prompt& message) {
  message.set_tokens(PackTokens(prompt.tokens));
  message.mutable_segment_lengths()->Add(prompt.segment_lengths.begin(), prompt.segment_lengths.end());
  message.set_media(PackMedia(prompt.media));
  message.set_salt(PackSalt(prompt.salt));
  if (uses_prefixes && prompt.conversation != ConversationId{}) {
    message.set_conversation(prompt.conversation.data(), prompt.conversation.size());
  }
}

std::string RandomLease() {
  constexpr size_t kLeaseBytes = 16;
  std::string lease(kLeaseBytes, '\0');
  while (::getrandom(lease.data(), lease.size(), 0) != static_cast<ssize_t>(lease.size())) {
    // Only a signal before the pool is seeded can interrupt such a short request.
  }
  return lease;
}

}  // namespace ashlar::internal
