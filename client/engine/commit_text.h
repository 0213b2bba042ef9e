// CommitText: offers a text that an engine has run through its model for later texts to resume from.
#pragma once

#include <string>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/setting.h"

namespace ashlar::engine {

// kInvalidArgument names the field behind `field`; kFailedPrecondition for a cache that was opened without
// capture_tokens.
Status CheckText(const CacheState& cache, const Text& text, const std::string& field);

// Commits and waits. `text` has been checked; its outcomes are written. `began`: the request of its prompt; may be
// null.
void CommitText(CacheState& cache, const Text& text, const Setting* began);
// Writes the same outcome for all checkpoints, without asking the daemon.
void SetOutcomes(const Text& text, CommitOutcome outcome);

}  // namespace ashlar::engine
