// SPDX-License-Identifier: Apache-2.0
// Writes a prompt into the daemon's message.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "client/session/match.h"

namespace ashlar::v1 {
class Prompt;
}

namespace ashlar::internal {

// Returns whether daemons of this protocol version support the media and the salt.
bool FitsProtocol(std::span<const MediaHash> media, const Salt& salt, uint32_t protocol);
bool FitsMessage(const Prompt& prompt, uint32_t protocol);
// Writes all fields but the time of need. `uses_prefixes`: only a model that uses prefixes may resume from a
// conversation's own states.
void Describe(const Prompt& prompt, bool uses_prefixes, v1::Prompt& message);
// Draws a random lease name. The engine draws it before the request, so that it can release a lease whose grant never
// arrived.
std::string RandomLease();

}  // namespace ashlar::internal
