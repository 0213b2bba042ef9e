// A text that an engine has run through its model, offered for later texts to resume from.
#pragma once

#include <string>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/setting.h"

namespace ashlar::engine {

// kInvalidArgument named behind `field`, kFailedPrecondition for a cache that was opened without capture_tokens.
Status CheckText(const CacheState& cache, const Text& text, const std::string& field);

// Waits. `text` has been checked; its outcomes are written. `began`: what it began as; may be null.
void CommitText(CacheState& cache, const Text& text, const Setting* began);
// The same without asking: all outcomes are this one.
void SetOutcomes(const Text& text, CommitOutcome outcome);

}  // namespace ashlar::engine
