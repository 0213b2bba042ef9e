// Batches of events in the form of vLLM's KV events (docs/formats.md), as msgpack.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"

namespace ashlar::daemon {

// Encodes what of the events is about blocks of shared prefixes; empty: nothing is. A gap is AllBlocksCleared: whoever
// follows forgets what it knew. `seconds`: since 1970.
std::string EncodeKvEvents(std::span<const CacheEvent> events, const BlockTexts& texts, double seconds);

}  // namespace ashlar::daemon
