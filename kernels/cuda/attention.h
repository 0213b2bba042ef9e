// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/attention.h on a CUDA queue: keys are split among blocks, and parts merged by log-sum-exp.
#pragma once

#include "kernels/attention.h"
#include "kernels/cuda/queue.h"

namespace ashlar::kernels::cuda {

Event AttendLanded(const AttendArgs& args, CudaQueue& queue);
Event AttendUnrotated(const AttendArgs& args, CudaQueue& queue);
Event AttendRotatedQuery(const AttendArgs& args, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
