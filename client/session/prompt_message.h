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

// Whether daemons that speak this version of the protocol can be told of the media, and of the salt.
bool FitsProtocol(std::span<const MediaHash> media, const Salt& salt, uint32_t protocol);
bool FitsMessage(const Prompt& prompt, uint32_t protocol);
// Writes all fields but the time of need. `uses_prefixes`: only a model that uses prefixes may resume from a
// conversation's own states.
void Describe(const Prompt& prompt, bool uses_prefixes, v1::Prompt& message);
// Draws the name of a lease. The engine draws it before it asks, so that it can release a lease whose grant never
// reached it.
std::string RandomLease();

}  // namespace ashlar::internal
