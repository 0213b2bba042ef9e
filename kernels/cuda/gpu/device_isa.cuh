// SPDX-License-Identifier: Apache-2.0
// The instructions of the GPU for which C++ has no words. emulator/device_isa.cuh has the same interface for a
// CPU: kernels include <device_isa.cuh>, and the build selects one of the two.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ashlar::kernels::cuda {

// The block's dynamic shared memory; its size is given at launch.
template <typename T>
__device__ __forceinline__ T* SharedMemory() {
  extern __shared__ uint4 shared_memory[];
  return reinterpret_cast<T*>(shared_memory);
}

__device__ __forceinline__ void SyncThreads() {
  __syncthreads();
}
__device__ __forceinline__ void SyncWarp() {
  __syncwarp();
}

// The value of the lane whose index differs in the bits of `mask`. All lanes of the warp take part.
template <typename T>
__device__ __forceinline__ T ShuffleXor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename T>
__device__ __forceinline__ T Shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// The upper 64 bits of a product.
__device__ __forceinline__ uint64_t HighProduct(uint64_t x, uint64_t y) {
  return __umul64hi(x, y);
}

__device__ __forceinline__ void AtomicMax(uint32_t* to, uint32_t value) {
  atomicMax(to, value);
}

// Copies 16 bytes to shared memory in the background; both addresses are multiples of 16. `valid` false: zeros.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
// Closes a group of copies, which may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for this thread's groups, all but the youngest `kPending`.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 × 8 matrices of 16-bit numbers from shared memory: lane l names row l % 8 of matrix l / 8 and gets of every
// matrix row l / 4, columns 2 (l % 4) and the next. Transposed: of every matrix column l / 4, rows 2 (l % 4) and the
// next.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

enum class Half16 { kF16, kBF16 };

// Two numbers rounded to nearest even, the first in the lower half.
template <Half16 kType>
__device__ __forceinline__ uint32_t Pack(float first, float second) {
  uint32_t packed;
  if constexpr (kType == Half16::kF16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  }
  return packed;
}
template <Half16 kType>
__device__ __forceinline__ uint16_t FromFloat(float value) {
  return static_cast<uint16_t>(Pack<kType>(value, 0.0f));
}
template <Half16 kType>
__device__ __forceinline__ float ToFloat(uint16_t bits) {
  if constexpr (kType == Half16::kBF16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ uint32_t FloatBits(float value) {
  return __float_as_uint(value);
}
__device__ __forceinline__ float FloatOf(uint32_t bits) {
  return __uint_as_float(bits);
}

// C [16, 8] += A [16, 16] B [16, 8] over the warp. Lane l, with g = l / 4 and t = l % 4, holds: A's rows g and g + 8,
// columns 2t and 2t + 1 in a[0] and a[1], columns 2t + 8 and 2t + 9 in a[2] and a[3]; B's column g, rows 2t, 2t + 1 and
// 2t + 8, 2t + 9; C's rows g (c[0], c[1]) and g + 8, columns 2t and 2t + 1.
template <Half16 kType>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kType == Half16::kF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The upper 19 bits of a number, rounded to nearest: the part of an fp32 operand that the tensor cores read.
__device__ __forceinline__ float RoundToTf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}
// C [16, 8] += A [16, 8] B [8, 8]: A's rows g and g + 8, column t in a[0] and a[1], column t + 4 in a[2] and a[3]; B's
// column g, rows t and t + 4; C as above. Operands must be rounded to tf32.
__device__ __forceinline__ void MultiplyAddTf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

}  // namespace ashlar::kernels::cuda
