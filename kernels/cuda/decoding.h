// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/decoding.h on a CUDA queue. The buffer's slots are applied
// to a column of the state one after another in registers, so state and buffer are read once and nothing else is moved.
#pragma once

#include "kernels/cuda/queue.h"
#include "kernels/decoding.h"

namespace ashlar::kernels::cuda {

Event DecodeBuffered(const DecodeBufferedArgs& args, CudaQueue& queue);
Event VerifyDrafts(const VerifyDraftsArgs& args, CudaQueue& queue);
Event RebuildState(const RebuildStateArgs& args, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
