// SPDX-License-Identifier: Apache-2.0
// Copies keys and values between stored units and paged slots, and computes units' checksums, on the CPU's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As in kernels.h, with checked arguments. `workers` null: only the calling thread.
void RotateKeys(const RotateKeysArgs& args, Workers* workers);
void Land(const LandArgs& args, Workers* workers);
void Gather(const GatherArgs& args, Workers* workers);
void Checksum(const ChecksumArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
