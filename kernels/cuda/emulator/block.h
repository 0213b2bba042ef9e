// SPDX-License-Identifier: Apache-2.0
// Runs the threads of a kernel's block on one CPU thread: each is a fiber that runs until it must wait for others.
// Warps take turns in an order that changes from barrier to barrier, so that a missing barrier is found.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar::kernels::cuda::emulator {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
// Calls body(context) once for every thread of every block. Dynamic shared memory is filled with NaN before each block.
void RunGrid(Index3 blocks, Index3 threads, size_t shared_bytes, void (*body)(void*), void* context);

void* SharedBytes();
void Barrier();  // barrier of the block

// Deposits `bytes` of every lane of the warp and waits for all of them; of(lane) then returns that lane's deposit,
// valid until the caller's next deposit. `operation` must be the same in all lanes.
inline constexpr size_t kDepositBytes = 32;
struct Deposits {
  const std::byte* lanes;
  template <typename T>
  const T& of(int lane) const {
    static_assert(sizeof(T) <= kDepositBytes);
    return *reinterpret_cast<const T*>(lanes + lane * kDepositBytes);
  }
};
Deposits Exchange(const char* operation, const void* value, size_t bytes);
int Lane();

// Background copies of the running fiber: nothing arrives before it has waited.
void CopyLater(void* to, const void* from, size_t bytes);
void CloseGroup();
void WaitForGroups(int pending);

}  // namespace ashlar::kernels::cuda::emulator

// Indices of the running fiber, with CUDA's names.
extern thread_local ashlar::kernels::cuda::emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;
