// SPDX-License-Identifier: Apache-2.0
// The linear layers on vectors, fp32 (HYPIC equations 2–6; runs of tokens in chunkwise form).
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As in kernels.h, with checked arguments. `workers` null: only the calling thread.
void Compose(const ComposeArgs& args, Workers* workers);
void ComposeTransitions(const ComposeTransitionsArgs& args, Workers* workers);
void Capture(const CaptureArgs& args, Workers* workers);
void AdvanceSeam(const AdvanceSeamArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
