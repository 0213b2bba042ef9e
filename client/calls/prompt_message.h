// A prompt as the daemon is told of it.
#pragma once

#include <string>

#include "ashlar/client.h"

namespace ashlar::v1 {
class Prompt;
}

namespace ashlar::internal {

bool FitsMessage(const Prompt& prompt);
// All but when it is needed. `uses_prefixes`: only such models may be resumed from a conversation's own states.
void Describe(const Prompt& prompt, bool uses_prefixes, v1::Prompt& message);
// The name of a lease, drawn before it is asked for, so that what is granted and never heard of can be released.
std::string RandomLease();

}  // namespace ashlar::internal
