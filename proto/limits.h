// SPDX-License-Identifier: Apache-2.0
// Every limit that both ends of a socket, or two versions of a disk, must agree on. Proofs are at the end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar::limits {

// Version of the control plane (RPCs and session socket). Both ends send the range they speak; the highest common
// version is used, none in common refuses the session.
inline constexpr uint32_t kProtocolMin = 2;
inline constexpr uint32_t kProtocolMax = 4;
inline constexpr uint32_t kProtocolWithMedia = 3;        // the first whose daemons read the media of a text
inline constexpr uint32_t kProtocolWithRotaryShift = 3;  // and a landing's shifts
inline constexpr uint32_t kProtocolWithSalt = 4;         // the first whose daemons read the salt of a text

// Version of what daemons say to one another (ashlar/v1/peer.proto), agreed on likewise in Greet.
inline constexpr uint32_t kPeerProtocolMin = 1;
inline constexpr uint32_t kPeerProtocolMax = 1;

// Memory is handed out, and objects are laid out, in extents of this size. No unit of a part straddles two extents.
inline constexpr uint64_t kExtentBytes = 256 * 1024;
inline constexpr uint64_t kUnitAlignment = 64;
// Stored keys and values come in units of as many tokens (a power of two) as fit here: one stays in a core's cache.
inline constexpr uint64_t kRowUnitBytes = 32 * 1024;

inline constexpr uint64_t kMaxPromptTokens = uint64_t{1} << 22;
inline constexpr uint64_t kMaxSegments = 16384;                // of one prompt
inline constexpr int64_t kMaxNeededInNanos = 600'000'000'000;  // how far ahead of its need a prompt may be matched
inline constexpr uint64_t kMaxPromptsPerCall = 64;
inline constexpr uint64_t kMaxLookupsPerMatch = 65536;  // segments of all prompts of a Match, each shard: one turn
inline constexpr uint64_t kMaxLeases = 65536;           // that one session holds
inline constexpr uint64_t kMaxLeasedSegments = uint64_t{1} << 20;  // listed in those, misses and shards, too
inline constexpr uint64_t kMaxMedia = 4096;                        // inputs (images, sounds) of one prompt, run or text
inline constexpr uint64_t kMaxSaltBytes = 4096;                    // that a caller gives; a digest of them travels
inline constexpr uint64_t kMaxObjectsPerCall = 64;                 // also reservations of an Abandon
inline constexpr uint64_t kMaxCheckpointsPerCommit = 64;
inline constexpr uint64_t kMaxSpanTokens = 256;      // of a span: longer ones mostly take more than a state does
inline constexpr uint32_t kPrefixBlockTokens = 256;  // of a prefix stored together, at least: whole pages (prefix.h)
inline constexpr uint64_t kMaxObjectsPerLanding = 32770;  // a prompt's segments, a prefix's blocks, checkpoint and span
inline constexpr uint64_t kMaxReleasesPerCall = 1024;     // leases of a Release
inline constexpr uint64_t kMaxStepsPerComposition = 4096;          // interiors and runs of one Advance or Compose
inline constexpr uint64_t kMaxTokensPerComposition = 65536;        // that its runs go through: what one worker may take
inline constexpr uint64_t kMaxCompositions = 16;                   // under way, of one session
inline constexpr uint32_t kMaxAllocatedPages = 1 << 20;            // of one region whose pages the daemon allocates
inline constexpr uint64_t kMaxPageReferences = uint64_t{1} << 20;  // of a tenant: requests, and segments they name
inline constexpr uint64_t kMaxObjectBytes = uint64_t{1} << 40;
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxTensorShards = 256;  // of one model
inline constexpr uint32_t kMaxHeads = 1024;
inline constexpr uint32_t kMaxHeadDim = 1024;       // attention; linear layers: kMaxLinearHeadDim
inline constexpr uint32_t kMaxLinearHeadDim = 256;  // = kernels::kMaxHeadDim
inline constexpr uint32_t kMaxConvKernel = 16;
inline constexpr uint32_t kMaxConvChannels = 1 << 16;
inline constexpr uint32_t kMaxSeam = 1 << 16;  // head, tail
inline constexpr uint32_t kMaxPageTokens = 1 << 16;
inline constexpr size_t kMaxStringBytes = 4096;                   // any string of an identity
inline constexpr size_t kMaxLayoutTableBytes = 32 * 1024 * 1024;  // decays and frequencies of a layout together

inline constexpr size_t kMaxPartSources = 16 * 1024;  // of one object to publish: more than any has

// The bytes of a gRPC message. gRPC's default of 4 MiB refuses a prompt of a million tokens.
inline constexpr size_t kMaxRequestBytes = 36 * 1024 * 1024;
inline constexpr size_t kMaxReplyBytes = 64 * 1024 * 1024;
inline constexpr size_t kMaxSessionMessageBytes = 64 * 1024;  // one datagram of the session socket
inline constexpr size_t kMaxDescriptorsPerMessage = 8;

// Between daemons.
inline constexpr uint64_t kMaxPeerKeysPerCall = 64;        // of an Open
inline constexpr uint64_t kMaxPeerLeasesPerCall = 1024;    // of a Renew or Close
inline constexpr size_t kMaxPeerHeaderBytes = 256 * 1024;  // of an object's header with its table: one extent
inline constexpr size_t kMaxPeerNameBytes = 253;           // of a node's name, and of a transport's address
inline constexpr uint32_t kMaxPeerLeaseMillis = 600'000;
inline constexpr uint32_t kMaxPeerPatienceMillis = 60'000;  // of an Offer
inline constexpr size_t kMaxPeerRequestBytes = 1024 * 1024;
inline constexpr size_t kMaxPeerReplyBytes = 20 * 1024 * 1024;

static_assert((kExtentBytes & (kExtentBytes - 1)) == 0,
              "an extent is a power of two, for huge pages and cheap division");
static_assert(kExtentBytes % kUnitAlignment == 0);
static_assert(kRowUnitBytes <= kExtentBytes);
static_assert(kMaxLinearHeadDim * kMaxLinearHeadDim * 4 <= kExtentBytes, "one head's fp32 transition fits an extent");
// The most bytes of one item of a call, beside 1 MiB for all else: a call of one item is always possible.
static_assert(kMaxPromptTokens * 4 + kMaxSegments * 10 + kMaxMedia * 40 + (1 << 20) < kMaxRequestBytes,
              "the longest prompt fits");
static_assert(kMaxPromptTokens * 5 + kMaxPartSources * 64 + kMaxMedia * 40 + (1 << 20) < kMaxRequestBytes,
              "pages and parts of the longest run fit");
static_assert(kMaxSegments + kMaxPromptTokens / kPrefixBlockTokens + 2 <= kMaxObjectsPerLanding);
static_assert(kMaxPromptTokens * 5 + kMaxObjectsPerLanding * 16 + (1 << 20) < kMaxRequestBytes,
              "the longest landing fits");
static_assert(kMaxPromptTokens * 5 + kMaxAllocatedPages * 5 + kMaxSegments * 16 + (1 << 20) < kMaxReplyBytes,
              "all pages of an admitted request fit a reply");
static_assert(kMaxStepsPerComposition * 128 + kMaxLayers * 64 + (1 << 20) < kMaxRequestBytes, "a composition fits");
static_assert(kMaxLayers * 16 <= kMaxPartSources, "every form of part of every layer");
static_assert(kMaxSegments <= kMaxLookupsPerMatch, "any prompt fits a call of its own");
static_assert(kMaxSegments * 16 <= kMaxLeasedSegments, "a session may hold matches of many longest prompts");
static_assert(kMaxLayoutTableBytes + kMaxLayers * 256 + 8 * kMaxStringBytes + (1 << 20) < kMaxRequestBytes,
              "a layout fits");
static_assert(kProtocolMin <= kProtocolMax);
static_assert(kPeerProtocolMin <= kPeerProtocolMax);
static_assert(kMaxPeerHeaderBytes == kExtentBytes, "an object's header lies within one extent");
static_assert(kMaxPeerKeysPerCall * (kMaxPeerHeaderBytes + 256) + (1 << 20) < kMaxPeerReplyBytes,
              "the objects of an Open fit a reply");
static_assert(kMaxPeerHeaderBytes + kMaxPeerLeasesPerCall * 32 + 4096 < kMaxPeerRequestBytes);

}  // namespace ashlar::limits
