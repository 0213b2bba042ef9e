// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention.h"
#include "kernels/cuda/chain.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/decoding.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/queue.h"
#include "kernels/cuda/rows.h"

namespace ashlar::kernels {
namespace {

class CudaMemory final : public DeviceMemory {
 public:
  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    cuda::Check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void Free(void* memory) override { cuda::Check(cudaFree(memory), "cudaFree"); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    cuda::Check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    // A copy from pageable memory may return while it is still in progress; queues do not wait for it.
    cuda::Check(cudaStreamSynchronize(nullptr), "cudaMemcpy");
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    cuda::Check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
};

class CudaKernels final : public Kernels {
 public:
  std::string_view name() const override { return "cuda"; }
  // Workers are not needed: all work is the device's.
  std::unique_ptr<Queue> MakeQueue(Workers*) const override { return std::make_unique<cuda::CudaQueue>(); }
  DeviceMemory* memory() const override { return &memory_; }

 protected:
  Event DoCompose(const ComposeArgs& args, Queue& queue) const override { return cuda::Compose(args, Cuda(queue)); }
  Event DoComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const override {
    return cuda::ComposeTransitions(args, Cuda(queue));
  }
  Event DoCapture(const CaptureArgs& args, Queue& queue) const override { return cuda::Capture(args, Cuda(queue)); }
  Event DoAdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const override {
    return cuda::AdvanceSeam(args, Cuda(queue));
  }
  Event DoDecodeBuffered(const DecodeBufferedArgs& args, Queue& queue) const override {
    return cuda::DecodeBuffered(args, Cuda(queue));
  }
  Event DoVerifyDrafts(const VerifyDraftsArgs& args, Queue& queue) const override {
    return cuda::VerifyDrafts(args, Cuda(queue));
  }
  Event DoRebuildState(const RebuildStateArgs& args, Queue& queue) const override {
    return cuda::RebuildState(args, Cuda(queue));
  }
  Event DoRotateKeys(const RotateKeysArgs& args, Queue& queue) const override {
    return cuda::RotateKeys(args, Cuda(queue));
  }
  Event DoLand(const LandArgs& args, Queue& queue) const override { return cuda::Land(args, Cuda(queue)); }
  Event DoGather(const GatherArgs& args, Queue& queue) const override { return cuda::Gather(args, Cuda(queue)); }
  Event DoChecksum(const ChecksumArgs& args, Queue& queue) const override { return cuda::Checksum(args, Cuda(queue)); }
  Event DoAttendLanded(const AttendArgs& args, Queue& queue) const override {
    return cuda::AttendLanded(args, Cuda(queue));
  }
  Event DoAttendUnrotated(const AttendArgs& args, Queue& queue) const override {
    return cuda::AttendUnrotated(args, Cuda(queue));
  }
  Event DoAttendRotatedQuery(const AttendArgs& args, Queue& queue) const override {
    return cuda::AttendRotatedQuery(args, Cuda(queue));
  }

 private:
  static cuda::CudaQueue& Cuda(Queue& queue) { return static_cast<cuda::CudaQueue&>(queue); }

  mutable CudaMemory memory_;
};

bool DeviceFits() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 && cuda::HasKernels();
}

}  // namespace

const Kernels* CudaOrNull() {
  static const CudaKernels kernels;
  static const bool usable = DeviceFits();
  return usable ? &kernels : nullptr;
}

}  // namespace ashlar::kernels
