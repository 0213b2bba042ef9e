// SPDX-License-Identifier: Apache-2.0
// Limits of prefill by other engines (docs/router.md) that both ends of a socket must agree on. See also
// proto/limits.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/limits.h"

namespace ashlar::limits {

inline constexpr uint64_t kMaxPrefillTokens = 128 * 1024;        // per segment
inline constexpr uint64_t kMaxPrefillResults = 16;               // per ServePrefill
inline constexpr int64_t kMaxPrefillWaitNanos = 60'000'000'000;  // per ServePrefill or AwaitPrefill

// Limits between daemons.
inline constexpr uint64_t kMaxPeerWorkers = 256;              // workers that a node reports
inline constexpr uint32_t kMaxPeerPrefillMillis = 3'600'000;  // longest time that a node waits for a segment

static_assert(kMaxPrefillTokens * sizeof(int32_t) + 4096 < kMaxPeerRequestBytes, "a segment to prefill fits");

}  // namespace ashlar::limits
