// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/rows.h on a CUDA queue.
#pragma once

#include "kernels/cuda/queue.h"
#include "kernels/rows.h"

namespace ashlar::kernels::cuda {

Event RotateKeys(const RotateKeysArgs& args, CudaQueue& queue);
Event Land(const LandArgs& args, CudaQueue& queue);
Event Gather(const GatherArgs& args, CudaQueue& queue);
Event Checksum(const ChecksumArgs& args, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
