// SPDX-License-Identifier: Apache-2.0
// Attention over keys in pages, on the processor's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As kernels.h says, arguments already checked. `workers` null: the calling thread alone.
void AttendLanded(const AttendArgs& args, Workers* workers);
void AttendUnrotated(const AttendArgs& args, Workers* workers);
void AttendRotatedQuery(const AttendArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
