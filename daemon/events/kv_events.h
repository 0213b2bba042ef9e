// SPDX-License-Identifier: Apache-2.0
// Encodes events as batches in the format of vLLM's KV events (docs/formats.md), in msgpack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"

namespace ashlar::daemon {

// Most tokens that are published with a block. A longer block is published without tokens.
constexpr size_t kMostEventTokens = 8192;
constexpr size_t kMostBatchBytes = 64 << 10;

// Returns how many of the first events fit into a batch of kMostBatchBytes, whatever their tokens; at least one if
// there are events.
size_t CountForABatch(std::span<const CacheEvent> events);

// Encodes the events about blocks of shared prefixes and, if `texts` keeps segments, about segments. Returns an empty
// string if there are none. A gap becomes AllBlocksCleared, so that consumers drop their state. `seconds` is the Unix
// time.
std::string EncodeKvEvents(std::span<const CacheEvent> events, const BlockTexts& texts, double seconds);

}  // namespace ashlar::daemon
