// SPDX-License-Identifier: Apache-2.0
// ReadStream, UpdateStream: the rate at which this machine's cores pass over memory that no cache holds. They are the
// limits of kernels that read states, and of kernels that read and write them.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/device.h"

namespace ashlar::bench {

// Seconds of one walk over `memory` by all workers, in blocks of a state's size (64 KiB; the rest is skipped). Read
// reads every byte. Update reads and rewrites every byte unchanged.
double ReadStream(std::span<const std::byte> memory, kernels::Workers& workers);
double UpdateStream(std::span<std::byte> memory, kernels::Workers& workers);

}  // namespace ashlar::bench
