// SPDX-License-Identifier: Apache-2.0
// The cuda back end, for GPUs of compute capability 8.0, 9.0 and 10.0.
#pragma once

#include <string>

#include "kernels/gpu.h"
#include "kernels/kernels.h"

namespace ashlar::kernels {

// Null if there is no driver, or no GPU for which this build has kernels. Queues belong to the device that is current
// when they are created, and to threads on which it is current.
const Kernels* CudaOrNull();

// FindGpu, where the back end is built.
const Gpu* FindCudaGpu(int number, std::string* why);

}  // namespace ashlar::kernels
