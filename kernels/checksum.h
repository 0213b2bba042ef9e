// SPDX-License-Identifier: Apache-2.0
// A unit's checksum, XXH3-64 with seed 0, the same on every back end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar::kernels {

// Uses the widest vectors of this CPU.
uint64_t UnitChecksum(const void* data, size_t bytes);

// The checksum of bytes that arrive in pieces, so that each piece is hashed while it is in the cache.
class ChecksumStream {
 public:
  ChecksumStream();

  void Update(const void* data, size_t bytes);
  uint64_t Digest() const;

 private:
  alignas(64) std::byte state_[576];  // XXH3_state_t
};

}  // namespace ashlar::kernels
