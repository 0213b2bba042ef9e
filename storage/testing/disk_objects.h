// SPDX-License-Identifier: Apache-2.0
// Objects for tests of the disk: headers that fill a given number of extents, and bytes to fill them with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "proto/limits.h"
#include "proto/object.h"

namespace ashlar::storage {

inline Key NumberedKey(uint64_t number) {
  Key key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

// A checkpoint of one attention layer whose keys and values take `extents` extents.
inline ObjectHeader HeaderOfExtents(uint64_t number, uint64_t extents) {
  const AttentionLayer attention{.kv_heads = 8, .key_dim = 128, .value_dim = 128};  // fp32: 4 KiB of either a token
  Layout layout{.page_tokens = 8, .layers = {attention}};
  // The first extent has space for seven units of 32 KiB beside the header, every other extent for eight.
  return PlanObject(layout, NamespaceId{}, NumberedKey(number), ObjectKind::kCheckpoint, 8 * (4 * extents - 1)).value();
}

// Extents of memory, aligned to pages.
class ExtentMemory {
 public:
  explicit ExtentMemory(size_t extents)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(4096, extents * limits::kExtentBytes)), &std::free),
        extents_(extents) {}

  std::byte* operator[](size_t extent) const { return bytes_.get() + extent * limits::kExtentBytes; }
  size_t extents() const { return extents_; }

  // Bytes that rarely occur twice, at any place.
  void Fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t offset = 0; offset < extents_ * limits::kExtentBytes; offset += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes_.get() + offset, &word, sizeof word);
    }
  }

 private:
  std::unique_ptr<std::byte[], decltype(&std::free)> bytes_;
  size_t extents_;
};

inline bool SameExtent(const std::byte* a, const std::byte* b) {
  return std::memcmp(a, b, limits::kExtentBytes) == 0;
}

}  // namespace ashlar::storage
