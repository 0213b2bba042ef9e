// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/linear.h on a CUDA queue: each copies the caller's structs to the device, then starts
// kernels.
#pragma once

#include "kernels/cuda/queue.h"
#include "kernels/linear.h"

namespace ashlar::kernels::cuda {

Event Compose(const ComposeArgs& args, CudaQueue& queue);
Event ComposeTransitions(const ComposeTransitionsArgs& args, CudaQueue& queue);
Event Capture(const CaptureArgs& args, CudaQueue& queue);
Event AdvanceSeam(const AdvanceSeamArgs& args, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
