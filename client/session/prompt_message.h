// SPDX-License-Identifier: Apache-2.0
// Writes a prompt into the daemon's message.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/session/match.h"

namespace ashlar::v1 {
class Prompt;
}

namespace ashlar::internal {

// INVALID_ARGUMENT if there are too many media, or daemons of this protocol version do not support the media or the
// salt. One code, because a call with several prompts is split after it. `name`: the message's prefix, such as
// "prompt".
absl::Status CheckProtocol(absl::string_view name, std::span<const MediaHash> media, const Salt& salt,
                           uint32_t protocol);
// The same, and INVALID_ARGUMENT if there are too many tokens or segments.
absl::Status CheckMessage(const Prompt& prompt, uint32_t protocol);
// Writes all fields but the time of need. `uses_prefixes`: only a model that uses prefixes may resume from a
// conversation's own states.
void Describe(const Prompt& prompt, bool uses_prefixes, v1::Prompt& message);
// Draws a random lease name. The engine draws it before the request, so that it can release a lease whose grant never
// arrived.
std::string RandomLease();

}  // namespace ashlar::internal
