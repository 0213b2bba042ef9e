// SPDX-License-Identifier: Apache-2.0
// Decoding from token buffers on the CPU's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As in kernels.h, with checked arguments. `workers` null: only the calling thread.
void DecodeBuffered(const DecodeBufferedArgs& args, Workers* workers);
void VerifyDrafts(const VerifyDraftsArgs& args, Workers* workers);
void RebuildState(const RebuildStateArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
