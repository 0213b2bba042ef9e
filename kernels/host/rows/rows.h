// SPDX-License-Identifier: Apache-2.0
// Keys and values on their way between stored units and paged slots, and units' checksums, on the processor's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As kernels.h says, arguments already checked. `workers` null: the calling thread alone.
void RotateKeys(const RotateKeysArgs& args, Workers* workers);
void Land(const LandArgs& args, Workers* workers);
void Gather(const GatherArgs& args, Workers* workers);
void Checksum(const ChecksumArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
