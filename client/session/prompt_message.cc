// SPDX-License-Identifier: Apache-2.0
#include "client/session/prompt_message.h"

#include <sys/random.h>

#include "ashlar/v1/cache.pb.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::internal {

absl::Status CheckProtocol(absl::string_view name, std::span<const MediaHash> media, const Salt& salt,
                           uint32_t protocol) {
  const auto upgrade = [&](const char* field, uint32_t needed) {
    return Invalid(name, ".", field, ": needs protocol ", needed, ", the daemon has ", protocol,
                   "; upgrade the daemon");
  };
  if (media.size() > limits::kMaxMedia)
    return Invalid(name, ".media: ", media.size(), " entries; expected at most ", limits::kMaxMedia);
  if (!media.empty() && protocol < limits::kProtocolWithMedia) return upgrade("media", limits::kProtocolWithMedia);
  if (salt != Salt{} && protocol < limits::kProtocolWithSalt) return upgrade("salt", limits::kProtocolWithSalt);
  return absl::OkStatus();
}

absl::Status CheckMessage(const Prompt& prompt, uint32_t protocol) {
  if (prompt.tokens.size() > limits::kMaxPromptTokens)
    return Invalid("prompt.tokens: ", prompt.tokens.size(), " tokens; expected at most ", limits::kMaxPromptTokens);
  if (prompt.segment_lengths.size() > limits::kMaxSegments) {
    return Invalid("prompt.segment_lengths: ", prompt.segment_lengths.size(), " segments; expected at most ",
                   limits::kMaxSegments);
  }
  return CheckProtocol("prompt", prompt.media, prompt.salt, protocol);
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
