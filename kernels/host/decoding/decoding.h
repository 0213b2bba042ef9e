// SPDX-License-Identifier: Apache-2.0
// Decoding from token buffers on the processor's vectors.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// As kernels.h says, arguments already checked. `workers` null: the calling thread alone.
void DecodeBuffered(const DecodeBufferedArgs& args, Workers* workers);
void VerifyDrafts(const VerifyDraftsArgs& args, Workers* workers);
void RebuildState(const RebuildStateArgs& args, Workers* workers);

}  // namespace ashlar::kernels::host
