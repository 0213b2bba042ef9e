// SPDX-License-Identifier: Apache-2.0
// Attention over keys in pages, on the CPU's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As in kernels.h, with checked arguments. `workers` null: only the calling thread.
void AttendLanded(const AttendArgs& args, Workers* workers);
void AttendUnrotated(const AttendArgs& args, Workers* workers);
void AttendRotatedQuery(const AttendArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
