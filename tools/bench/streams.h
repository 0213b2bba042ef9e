// How fast this machine's cores walk through memory that no cache holds: the limits of what reads states, and of what
// reads and writes them.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/device.h"

namespace ashlar::bench {

// Seconds of one walk over `memory` by all workers, in blocks of a state's size (64 KiB; the rest is left out). Read
// reads every byte. Update reads and writes every byte, and leaves it as it was.
double ReadStream(std::span<const std::byte> memory, kernels::Workers& workers);
double UpdateStream(std::span<std::byte> memory, kernels::Workers& workers);

}  // namespace ashlar::bench
