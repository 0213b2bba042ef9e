// SPDX-License-Identifier: Apache-2.0
// Batches of events in the form of vLLM's KV events (docs/formats.md), as msgpack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"

namespace ashlar::daemon {

// Tokens of a block that is published with them: a longer one is published as if they were not known.
constexpr size_t kMostEventTokens = 8192;
constexpr size_t kMostBatchBytes = 64 << 10;

// Returns how many of the first events fit a batch of kMostBatchBytes, whatever tokens they are encoded with: at least
// one, where there is any.
size_t CountForABatch(std::span<const CacheEvent> events);

// Encodes what of the events is about blocks of shared prefixes; empty: nothing is. A gap is AllBlocksCleared: whoever
// follows erases what it knew. `seconds`: since 1970.
std::string EncodeKvEvents(std::span<const CacheEvent> events, const BlockTexts& texts, double seconds);

}  // namespace ashlar::daemon
