// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu.h"

#include <cstring>
#include <map>

#include "kernels/cuda/chain.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_arena.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/queue.h"
#include "kernels/mutex.h"

namespace ashlar::kernels {
namespace cuda {
namespace {

class Registered final : public HostRegistration {
 public:
  explicit Registered(void* data) : data_(data) {}
  ~Registered() override { Check(cudaHostUnregister(data_), "cudaHostUnregister"); }

 private:
  void* const data_;
};

class CudaGpu final : public Gpu {
 public:
  CudaGpu(int number, const GpuId& id, const Driver& driver, const Kernels& kernels)
      : number_(number), id_(id), driver_(driver), kernels_(kernels) {}

  void Enter() const override { Check(cudaSetDevice(number_), "cudaSetDevice"); }
  const Kernels& kernels() const override { return kernels_; }
  const GpuId& id() const override { return id_; }
  bool Reserve(Queue& queue, size_t bytes) const override {
    Enter();
    return static_cast<CudaQueue&>(queue).Reserve(bytes);
  }

  std::unique_ptr<ArenaMemory> MakeArena(uint64_t bytes, ArenaError* error) const override {
    std::unique_ptr<DeviceArena> arena = DeviceArena::Make(driver_, number_, bytes, error);
    if (arena == nullptr) return nullptr;
    Enter();
    Check(cudaMemsetAsync(arena->data(), 0, arena->bytes(), nullptr), "cudaMemset");
    Check(cudaStreamSynchronize(nullptr), "cudaMemset");
    return arena;
  }
  std::unique_ptr<ArenaMemory> ImportArena(int descriptor, uint64_t bytes, ArenaError* error) const override {
    return DeviceArena::Import(driver_, number_, descriptor, bytes, DeviceArena::Access::kReadWrite, error);
  }

  std::unique_ptr<HostRegistration> Register(void* data, uint64_t bytes, ArenaError* error) const override {
    Enter();
    const cudaError_t code = cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (code == cudaSuccess) return std::make_unique<Registered>(data);
    cudaGetLastError();  // otherwise the next launch would report it
    *error = {.out_of_memory = code == cudaErrorMemoryAllocation,
              .message = std::string("cudaHostRegister: ") + cudaGetErrorString(code) + " (" + std::to_string(bytes) +
                         " bytes)"};
    return nullptr;
  }

 private:
  const int number_;
  const GpuId id_;
  const Driver& driver_;
  const Kernels& kernels_;
};

std::unique_ptr<Gpu> Open(int number, std::string* why) {
  const Driver* driver = SystemDriver();
  if (driver == nullptr) {
    *why = "no CUDA driver with virtual memory management; install a newer driver";
    return nullptr;
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  if (number < 0 || number >= count) {
    *why = "out of range; CUDA shows " + std::to_string(count) + " GPUs";
    return nullptr;
  }
  if (cudaSetDevice(number) != cudaSuccess || CudaOrNull() == nullptr || !HasKernels()) {
    *why = "this build has no kernels for this GPU; rebuild with its compute capability";
    return nullptr;
  }
  int same = 0;
  if (cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, number) != cudaSuccess || same == 0) {
    *why = "the GPU cannot access registered host memory by its CPU address; use another GPU";
    return nullptr;
  }
  CUdevice device = 0;
  CUuuid uuid = {};
  if (driver->init(0) != CUDA_SUCCESS || driver->device_get(&device, number) != CUDA_SUCCESS ||
      driver->device_get_uuid(&uuid, device) != CUDA_SUCCESS) {
    *why = "the driver returns no UUID for this GPU";
    return nullptr;
  }
  GpuId id;
  static_assert(sizeof id == sizeof uuid.bytes);
  std::memcpy(id.data(), uuid.bytes, sizeof id);
  return std::make_unique<CudaGpu>(number, id, *driver, *CudaOrNull());
}

}  // namespace
}  // namespace cuda

const Gpu* FindCudaGpu(int number, std::string* why) {
  static Mutex mutex;
  static auto& found ABSL_GUARDED_BY(mutex) = *new std::map<int, std::unique_ptr<Gpu>>();
  MutexLock lock(mutex);
  std::unique_ptr<Gpu>& gpu = found[number];
  if (gpu == nullptr) gpu = cuda::Open(number, why);
  return gpu.get();
}

}  // namespace ashlar::kernels
