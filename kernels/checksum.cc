// SPDX-License-Identifier: Apache-2.0
#include "kernels/checksum.h"

// The state's size and alignment.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
#if defined(__x86_64__) && !defined(XXH_INLINE_ALL)
// Replaces the functions below by ones that choose among SSE2, AVX2 and AVX-512 at run time.
#include <xxh_x86dispatch.h>
#endif

#include "kernels/kernels.h"

namespace ashlar::kernels {

uint64_t UnitChecksum(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

ChecksumStream::ChecksumStream() {
  static_assert(sizeof(state_) >= sizeof(XXH3_state_t) && alignof(ChecksumStream) >= alignof(XXH3_state_t));
  XXH3_64bits_reset(reinterpret_cast<XXH3_state_t*>(state_));
}

void ChecksumStream::Update(const void* data, size_t bytes) {
  XXH3_64bits_update(reinterpret_cast<XXH3_state_t*>(state_), data, bytes);
}

uint64_t ChecksumStream::Digest() const {
  return XXH3_64bits_digest(reinterpret_cast<const XXH3_state_t*>(state_));
}

uint64_t CombineChecksums(std::span<const uint64_t> unit_checksums) {
  return XXH3_64bits(unit_checksums.data(), unit_checksums.size_bytes());
}

}  // namespace ashlar::kernels
