// SPDX-License-Identifier: Apache-2.0
// Launching kernels, and what happens when CUDA refuses: the program ends with CUDA's reason.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ashlar::kernels::cuda {

// Ends the program with `what` and the reason unless `error` is success.
void Check(cudaError_t error, const char* what);

template <typename... Parameters>
void Launch(const char* what, void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes,
            cudaStream_t stream, const Parameters&... parameters) {
  // More than 48 KiB of shared memory must be requested.
  if (shared_bytes > (48 << 10)) {
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          what);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  Check(cudaLaunchKernelEx(&config, kernel, parameters...), what);
}

constexpr int64_t CeilDivide(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

}  // namespace ashlar::kernels::cuda
