// SPDX-License-Identifier: Apache-2.0
// Limits that both ends of a socket, or two versions of a disk, must agree on. static_asserts at the end prove that
// they fit together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar::limits {

// Version of the control plane (RPCs and session socket). Both ends send the range that they speak. The highest common
// version is used; without a common version the session is refused.
inline constexpr uint32_t kProtocolMin = 2;
inline constexpr uint32_t kProtocolMax = 5;
inline constexpr uint32_t kProtocolWithMedia = 3;         // first version with media in texts
inline constexpr uint32_t kProtocolWithRotaryShift = 3;   // first version with rotary shifts in landings
inline constexpr uint32_t kProtocolWithSalt = 4;          // first version with salts in texts
inline constexpr uint32_t kProtocolWithPrefixBlocks = 5;  // first version with shared blocks of prefixes

// Version of the protocol between daemons (ashlar/v1/peer.proto). Greet negotiates it in the same way.
inline constexpr uint32_t kPeerProtocolMin = 1;
inline constexpr uint32_t kPeerProtocolMax = 1;

// Unit of allocation and of object layout. No unit of a part crosses an extent boundary.
inline constexpr uint64_t kExtentBytes = 256 * 1024;
inline constexpr uint64_t kUnitAlignment = 64;
// Target size of one unit of stored keys and values. A unit has the largest power of two of tokens that fits. It stays
// in the cache of one CPU core.
inline constexpr uint64_t kRowUnitBytes = 32 * 1024;

inline constexpr uint64_t kMaxPromptTokens = uint64_t{1} << 22;
inline constexpr uint64_t kMaxSegments = 16384;                // per prompt
inline constexpr int64_t kMaxNeededInNanos = 600'000'000'000;  // longest time between a match and the use of its result
inline constexpr uint64_t kMaxPromptsPerCall = 64;
// per Match: segments of all prompts × shards; bounds one turn of the metadata thread
inline constexpr uint64_t kMaxLookupsPerMatch = 65536;
inline constexpr uint64_t kMaxLeases = 65536;  // per session
// entries of all leases of a session, including misses and shards
inline constexpr uint64_t kMaxLeasedSegments = uint64_t{1} << 20;
inline constexpr uint64_t kMaxMedia = 4096;         // images and sounds per prompt, run or text
inline constexpr uint64_t kMaxSaltBytes = 4096;     // length of a caller's salt; only its digest is sent
inline constexpr uint64_t kMaxObjectsPerCall = 64;  // also reservations per Abandon
inline constexpr uint64_t kMaxCheckpointsPerCommit = 64;
inline constexpr uint64_t kMaxSpanTokens = 256;  // per span; longer spans usually take more bytes than a state
// minimum tokens per prefix block, which has whole pages (proto/prefix.h)
inline constexpr uint32_t kPrefixBlockTokens = 256;
// segments of a prompt, and blocks, checkpoint and span of a prefix
inline constexpr uint64_t kMaxObjectsPerLanding = 32770;
inline constexpr uint64_t kMaxReleasesPerCall = 1024;      // leases per Release
inline constexpr uint64_t kMaxStepsPerComposition = 4096;  // interiors and runs per Advance
// tokens of all runs of one composition; bounds one worker job
inline constexpr uint64_t kMaxTokensPerComposition = 65536;
inline constexpr uint64_t kMaxCompositions = 16;         // compositions in flight per session
inline constexpr uint32_t kMaxAllocatedPages = 1 << 20;  // pages that the daemon allocates in one region
// per tenant: admitted requests plus the segments they list
inline constexpr uint64_t kMaxPageReferences = uint64_t{1} << 20;
inline constexpr uint64_t kMaxObjectBytes = uint64_t{1} << 40;
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxTensorShards = 256;  // shards per model
inline constexpr uint32_t kMaxHeads = 1024;
inline constexpr uint32_t kMaxHeadDim = 1024;       // attention layers; linear layers have kMaxLinearHeadDim
inline constexpr uint32_t kMaxLinearHeadDim = 256;  // = kernels::kMaxHeadDim
inline constexpr uint32_t kMaxConvKernel = 16;
inline constexpr uint32_t kMaxConvChannels = 1 << 16;
inline constexpr uint32_t kMaxSeam = 1 << 16;  // widest head or tail seam in tokens
inline constexpr uint32_t kMaxPageTokens = 1 << 16;
inline constexpr size_t kMaxStringBytes = 4096;                   // length of a string in an identity
inline constexpr size_t kMaxLayoutTableBytes = 32 * 1024 * 1024;  // decay tables and frequencies of a layout together

inline constexpr size_t kMaxPartSources = 16 * 1024;  // part sources per object to publish; more than any object has

// Size of a gRPC message. gRPC's default of 4 MiB would refuse a prompt of a million tokens.
inline constexpr size_t kMaxRequestBytes = 36 * 1024 * 1024;
inline constexpr size_t kMaxReplyBytes = 64 * 1024 * 1024;
inline constexpr size_t kMaxSessionMessageBytes = 64 * 1024;  // size of a datagram on the session socket
inline constexpr size_t kMaxDescriptorsPerMessage = 8;

// Limits between daemons.
inline constexpr uint64_t kMaxPeerKeysPerCall = 64;        // keys per Open
inline constexpr uint64_t kMaxPeerLeasesPerCall = 1024;    // leases per Renew or Close
inline constexpr size_t kMaxPeerHeaderBytes = 256 * 1024;  // header and part table of an object: one extent
inline constexpr size_t kMaxPeerNameBytes = 253;           // length of a node name and of a transport address
inline constexpr uint32_t kMaxPeerLeaseMillis = 600'000;
inline constexpr uint32_t kMaxPeerPatienceMillis = 60'000;  // longest wait of an Offer
inline constexpr size_t kMaxPeerRequestBytes = 1024 * 1024;
inline constexpr size_t kMaxPeerReplyBytes = 20 * 1024 * 1024;

static_assert((kExtentBytes & (kExtentBytes - 1)) == 0,
              "an extent is a power of two, for huge pages and cheap division");
static_assert(kExtentBytes % kUnitAlignment == 0);
static_assert(kRowUnitBytes <= kExtentBytes);
static_assert(kMaxLinearHeadDim * kMaxLinearHeadDim * 4 <= kExtentBytes, "one head's fp32 transition fits an extent");
// A call with one item of the largest size fits in a message, together with 1 MiB for everything else.
static_assert(kMaxPromptTokens * 4 + kMaxSegments * 10 + kMaxMedia * 40 + (1 << 20) < kMaxRequestBytes,
              "the longest prompt fits");
static_assert(kMaxPromptTokens * 5 + kMaxPartSources * 64 + kMaxMedia * 40 + (1 << 20) < kMaxRequestBytes,
              "pages and parts of the longest run fit");
static_assert(kMaxSegments + kMaxPromptTokens / kPrefixBlockTokens + 2 <= kMaxObjectsPerLanding);
static_assert(kMaxPromptTokens * 5 + kMaxObjectsPerLanding * 16 + (1 << 20) < kMaxRequestBytes,
              "the longest landing fits");
static_assert(kMaxPromptTokens * 5 + kMaxAllocatedPages * 5 + kMaxObjectsPerLanding * 16 + (1 << 20) < kMaxReplyBytes,
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
