#include "kernels/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/kernels.h"

namespace ashlar::kernels {

uint64_t UnitChecksum(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

uint64_t CombineChecksums(std::span<const uint64_t> unit_checksums) {
  return XXH3_64bits(unit_checksums.data(), unit_checksums.size_bytes());
}

}  // namespace ashlar::kernels
