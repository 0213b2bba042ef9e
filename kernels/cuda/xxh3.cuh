// SPDX-License-Identifier: Apache-2.0
// XXH3-64 with seed 0 by a block of threads: the numbers of kernels/checksum.h, computed from one unit's bytes.
//
// Bytes are read in stripes of 64. The term that a stripe adds to the eight accumulators does not depend on them; only
// the scrambling after every sixteen stripes does. So all threads sum stripes, and eight threads scramble.
#pragma once

#include <cstdint>
#include <device_isa.cuh>

namespace ashlar::kernels::cuda {

namespace xxh3 {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kStripeBytes = 64, kBlockStripes = 16, kBlockBytes = kStripeBytes * kBlockStripes;
inline constexpr int kRoundBlocks = 64;  // summed between two scramblings
// Shared memory that Digest works in.
struct alignas(16) Scratch {
  uint64_t sums[kRoundBlocks][8];
  uint64_t digest;
};

inline constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                          kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                          kPrime64_5 = 0x27D4EB2F165667C5u;

// clang-format off
alignas(8) __device__ static const uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
// clang-format on

// Little-endian, at any address.
__device__ inline uint64_t Read64(const uint8_t* from) {
  uint64_t value = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return value;
}
// A word of the secret, at a multiple of eight.
__device__ inline uint64_t SecretWord(int offset) {
  return *reinterpret_cast<const uint64_t*>(kSecret + offset);
}
__device__ inline uint64_t Read32(const uint8_t* from) {
  return from[0] | static_cast<uint64_t>(from[1]) << 8 | static_cast<uint64_t>(from[2]) << 16 |
         static_cast<uint64_t>(from[3]) << 24;
}
__device__ inline uint64_t RotateLeft(uint64_t x, int bits) {
  return x << bits | x >> (64 - bits);
}
__device__ inline uint64_t SwapBytes(uint64_t x) {
  uint64_t swapped = 0;
  for (int i = 0; i < 8; ++i) swapped |= (x >> (8 * i) & 0xff) << (56 - 8 * i);
  return swapped;
}
__device__ inline uint64_t FoldedProduct(uint64_t x, uint64_t y) {
  return x * y ^ HighProduct(x, y);
}
__device__ inline uint64_t Avalanche(uint64_t x) {
  x ^= x >> 37;
  x *= 0x165667919E3779F9u;
  return x ^ x >> 32;
}
__device__ inline uint64_t Avalanche64(uint64_t x) {  // XXH64's
  x ^= x >> 33;
  x *= kPrime64_2;
  x ^= x >> 29;
  x *= kPrime64_3;
  return x ^ x >> 32;
}
__device__ inline uint64_t Mix16(const uint8_t* data, const uint8_t* secret) {
  return FoldedProduct(Read64(data) ^ Read64(secret), Read64(data + 8) ^ Read64(secret + 8));
}

__device__ inline uint64_t UpTo16(const uint8_t* data, uint32_t bytes) {
  if (bytes > 8) {
    const uint64_t low = Read64(data) ^ Read64(kSecret + 24) ^ Read64(kSecret + 32);
    const uint64_t high = Read64(data + bytes - 8) ^ Read64(kSecret + 40) ^ Read64(kSecret + 48);
    return Avalanche(bytes + SwapBytes(low) + high + FoldedProduct(low, high));
  }
  if (bytes >= 4) {
    uint64_t x = Read32(data + bytes - 4) + (Read32(data) << 32);
    x ^= Read64(kSecret + 8) ^ Read64(kSecret + 16);
    x ^= RotateLeft(x, 49) ^ RotateLeft(x, 24);
    x *= 0x9FB21C651E98DF25u;
    x ^= (x >> 35) + bytes;
    x *= 0x9FB21C651E98DF25u;
    return x ^ x >> 28;
  }
  if (bytes == 0) return Avalanche64(Read64(kSecret + 56) ^ Read64(kSecret + 64));
  const uint64_t x = static_cast<uint64_t>(data[0]) << 16 | static_cast<uint64_t>(data[bytes / 2]) << 24 |
                     data[bytes - 1] | static_cast<uint64_t>(bytes) << 8;
  return Avalanche64(x ^ Read32(kSecret) ^ Read32(kSecret + 4));
}

__device__ inline uint64_t UpTo240(const uint8_t* data, uint32_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  if (bytes <= 128) {
    const int pairs = static_cast<int>(bytes - 1) / 32;
    for (int i = pairs; i >= 0; --i) {
      sum += Mix16(data + 16 * i, kSecret + 32 * i);
      sum += Mix16(data + bytes - 16 * (i + 1), kSecret + 32 * i + 16);
    }
    return Avalanche(sum);
  }
  for (int i = 0; i < 8; ++i) sum += Mix16(data + 16 * i, kSecret + 16 * i);
  sum = Avalanche(sum);
  for (int i = 8; i < static_cast<int>(bytes / 16); ++i) sum += Mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3);
  return Avalanche(sum + Mix16(data + bytes - 16, kSecret + 136 - 17));
}

struct Chunk {
  uint64_t first, second;
};
__device__ inline Chunk ReadChunk(const uint8_t* from, bool aligned) {
  if (!aligned) return {Read64(from), Read64(from + 8)};
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {words.x | static_cast<uint64_t>(words.y) << 32, words.z | static_cast<uint64_t>(words.w) << 32};
}
__device__ inline uint64_t Keyed(uint64_t data, uint64_t secret) {
  const uint64_t x = data ^ secret;
  return (x & 0xffffffffu) * (x >> 32);
}

// Sums the terms of the stripes of one block of sixteen, in sums[0 … 7]; by one warp.
__device__ inline void SumBlock(const uint8_t* data, int64_t block, int64_t stripes, bool aligned, uint64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, pair = lane % 4;
  uint64_t even = 0, odd = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int stripe = lane / 4 + 8 * half;
    if (block * kBlockStripes + stripe >= stripes) continue;
    const Chunk chunk = ReadChunk(data + block * kBlockBytes + stripe * kStripeBytes + 16 * pair, aligned);
    const int secret = 8 * stripe + 16 * pair;
    even += chunk.second + Keyed(chunk.first, SecretWord(secret));
    odd += chunk.first + Keyed(chunk.second, SecretWord(secret + 8));
  }
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    even += ShuffleXor(even, mask);
    odd += ShuffleXor(odd, mask);
  }
  if (lane >= 4) return;
  sums[2 * pair] = even;
  sums[2 * pair + 1] = odd;
}

}  // namespace xxh3

// The hash of `bytes` at `data`, shared or global memory. All kThreads threads of the block take part and get it; their
// earlier writes to `data` must be ordered by a barrier.
__device__ inline __attribute__((noinline)) uint64_t Digest(const void* bytes_of_unit, int64_t bytes,
                                                            xxh3::Scratch& scratch) {
  using namespace xxh3;
  const auto* data = static_cast<const uint8_t*>(bytes_of_unit);
  const int thread = static_cast<int>(threadIdx.x);
  if (bytes <= 240) {
    if (thread == 0) {
      const auto length = static_cast<uint32_t>(bytes);
      scratch.digest = length <= 16 ? UpTo16(data, length) : UpTo240(data, length);
    }
    SyncThreads();
    const uint64_t digest = scratch.digest;
    SyncThreads();
    return digest;
  }
  const uint64_t start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                             kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  uint64_t accumulator = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) accumulator = thread == i ? start[i] : accumulator;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  // The last 64 bytes form a separate stripe, and may be read twice.
  const int64_t stripes = (bytes - 1) / kStripeBytes, full_blocks = (bytes - 1) / kBlockBytes;
  for (int64_t first = 0; first <= full_blocks; first += kRoundBlocks) {
    const int count = static_cast<int>(full_blocks + 1 - first < kRoundBlocks ? full_blocks + 1 - first : kRoundBlocks);
    for (int b = thread / 32; b < count; b += kWarps) SumBlock(data, first + b, stripes, aligned, scratch.sums[b]);
    SyncThreads();
    for (int b = 0; thread < 8 && b < count; ++b) {
      accumulator += scratch.sums[b][thread];
      if (first + b == full_blocks) break;
      accumulator ^= accumulator >> 47;
      accumulator ^= SecretWord(128 + 8 * thread);
      accumulator *= kPrime32_1;
    }
    SyncThreads();
  }
  if (thread < 8) {
    const uint8_t* last = data + bytes - kStripeBytes;
    accumulator +=
        Read64(last + 8 * (thread ^ 1)) + Keyed(Read64(last + 8 * thread), Read64(kSecret + 121 + 8 * thread));
    scratch.sums[0][thread] = accumulator;
  }
  SyncThreads();
  uint64_t digest = static_cast<uint64_t>(bytes) * kPrime64_1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    digest += FoldedProduct(scratch.sums[0][2 * i] ^ Read64(kSecret + 11 + 16 * i),
                            scratch.sums[0][2 * i + 1] ^ Read64(kSecret + 19 + 16 * i));
  }
  SyncThreads();
  return Avalanche(digest);
}

}  // namespace ashlar::kernels::cuda
