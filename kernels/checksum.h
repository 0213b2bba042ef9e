// XXH3-64 with seed 0: what a unit's checksum is, on every back end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar::kernels {

uint64_t UnitChecksum(const void* data, size_t bytes);

}  // namespace ashlar::kernels
