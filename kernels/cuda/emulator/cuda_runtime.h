// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime API that the back end uses, emulated on the CPU: device memory is host memory, and work is
// done when it is submitted. Kernels that include <cuda_runtime.h> get this file in the emulated build.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "kernels/cuda/emulator/block.h"
#include "kernels/cuda/emulator/driver.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  dim3(unsigned its_x = 1, unsigned its_y = 1, unsigned its_z = 1) : x(its_x), y(its_y), z(its_z) {}
  unsigned x, y, z;
};

inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(x * M_PI));
  *cosine = static_cast<float>(std::cos(x * M_PI));
}
using std::isfinite, std::isinf;  // the others are global in C already

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorNotSupported = 801
};
using cudaStream_t = void*;
using cudaEvent_t = void*;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorHostMemoryAlreadyRegistered ? "registered already" : "error";
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = ashlar::kernels::cuda::emulator::kDevices;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = ashlar::kernels::cuda::emulator::CurrentDevice();
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return ashlar::kernels::cuda::emulator::SetCurrentDevice(device) ? cudaSuccess : cudaErrorInvalidDevice;
}
// A device with few multiprocessors, so that small grids are split as on a large one, and the smallest shared memory of
// all targets.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 163 << 10 : 8;
  return cudaSuccess;
}
// A stream is the number of its device plus one; null is any thread's.
inline cudaStream_t emulated_stream() {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(ashlar::kernels::cuda::emulator::CurrentDevice()) + 1);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = emulated_stream();
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFreeHost(void* memory) {
  return cudaFree(memory);
}
// Kernels access all memory here; the caller is only recorded.
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
inline cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  return ashlar::kernels::cuda::emulator::RegisterHost(memory, bytes) ? cudaSuccess
                                                                      : cudaErrorHostMemoryAlreadyRegistered;
}
inline cudaError_t cudaHostUnregister(void* memory) {
  return ashlar::kernels::cuda::emulator::UnregisterHost(memory) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  const ashlar::kernels::cuda::emulator::DeviceWork work;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  const ashlar::kernels::cuda::emulator::DeviceWork work;
  std::memset(to, value, bytes);
  return cudaSuccess;
}
// Memory that was not made to be shared cannot be shared here.
struct cudaIpcMemHandle_t {
  char reserved[64];
};
enum { cudaIpcMemLazyEnablePeerAccess = 1 };
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return cudaErrorNotSupported;
}
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return cudaErrorNotSupported;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) {
  return cudaErrorNotSupported;
}
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {arguments...}};
  if (config->stream != nullptr && config->stream != emulated_stream()) return cudaErrorInvalidResourceHandle;
  const ashlar::kernels::cuda::emulator::DeviceWork work;
  const auto index = [](dim3 size) { return ashlar::kernels::cuda::emulator::Index3{size.x, size.y, size.z}; };
  ashlar::kernels::cuda::emulator::RunGrid(
      index(config->gridDim), index(config->blockDim), config->dynamicSmemBytes,
      [](void* context) {
        const Call& launched = *static_cast<const Call*>(context);
        std::apply(launched.kernel, launched.arguments);
      },
      &call);
  return cudaSuccess;
}
