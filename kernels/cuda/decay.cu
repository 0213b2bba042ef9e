// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decay.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"

namespace ashlar::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNumbers = 8;  // neighbours in memory, of one thread
constexpr int kSteps = 8;    // steps whose decays are in shared memory, and whose end states are in flight, at once

// The place of a thread's numbers: one row (k-first) or one column (v-first) of the state.
struct NumberPlace {
  __device__ NumberPlace(const Chain& chain, int64_t index)
      : i(static_cast<int>(chain.value_first ? index % chain.d_k : index / chain.d_v)),
        j(static_cast<int>(chain.value_first ? index / chain.d_k : index % chain.d_v)),
        next_i(chain.value_first ? 1 : 0),
        next_j(chain.value_first ? 0 : 1) {}
  int i, j;  // row and column of the first number
  int next_i, next_j;
};

// kNumbers numbers of a type in memory order.
template <DType kType>
struct Packed {
  static constexpr int kWords = kNumbers * static_cast<int>(ElementBytes(kType)) / 16;
  uint4 words[kWords];

  __device__ void Read(const void* from, int64_t index) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = static_cast<const uint4*>(from)[index * static_cast<int>(ElementBytes(kType)) / 16 + w];
    }
  }
  __device__ void Unpack(float (&numbers)[kNumbers]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits[4] = {words[w].x, words[w].y, words[w].z, words[w].w};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if constexpr (kType == DType::kF32) {
          numbers[4 * w + b] = FloatOf(bits[b]);
        } else {
          constexpr Half16 kHalf = kType == DType::kF16 ? Half16::kF16 : Half16::kBF16;
          numbers[2 * b] = ToFloat<kHalf>(static_cast<uint16_t>(bits[b]));
          numbers[2 * b + 1] = ToFloat<kHalf>(static_cast<uint16_t>(bits[b] >> 16));
        }
      }
    }
  }
};

// Returns how many factors a step has: one for all numbers, one per row, or one per column.
__device__ inline int FactorWidth(const Chain& chain) {
  if (chain.family == Family::kGla) return chain.d_k;
  return chain.family == Family::kMamba1 ? chain.d_v : 1;
}

// Writes a thread's numbers of a head's state, from `index` on. A state that is rounded later also gets the largest
// number of the head.
__device__ inline void WriteNumbers(const Chain& chain, int32_t head, int64_t index, bool inside,
                                    const float (&numbers)[kNumbers]) {
  float largest = 0;
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) {
    if (!inside) continue;
    if (chain.state.wide == nullptr) {
      Store(chain.state.dtype, chain.state.heads[head], index + n, numbers[n]);
    } else {
      chain.state.wide[static_cast<int64_t>(head) * chain.d_k * chain.d_v + index + n] = numbers[n];
      largest = fmaxf(largest, fabsf(numbers[n]));
    }
  }
  if (chain.state.wide == nullptr) return;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, ShuffleXor(largest, mask));
  if (threadIdx.x % 32 == 0) AtomicMax(chain.state.largest + head, FloatBits(largest));
}

// One block: kThreads × kNumbers numbers of one head's state.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 2) DecayKernel(const __grid_constant__ Chain chain) {
  // e^{log decay}; mamba1: Σ dt; −∞ for a transition of zero.
  float* factors = SharedMemory<float>();
  const auto head = static_cast<int32_t>(blockIdx.y);
  const bool by_row = chain.family == Family::kGla, elementwise = chain.family == Family::kMamba1;
  const int width = FactorWidth(chain);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kNumbers;
  const bool inside = index < static_cast<int64_t>(chain.d_k) * chain.d_v;
  const NumberPlace place(chain, index);

  float numbers[kNumbers] = {}, table[kNumbers] = {};
  const float start_scale = ldexpf(1, chain.start_exponents == nullptr ? 0 : chain.start_exponents[head]);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) {
    if (!inside) continue;
    numbers[n] = start_scale * Load(chain.start_dtype, chain.start[head], index + n);
    const int64_t row = static_cast<int64_t>(head) * chain.d_k + place.i + n * place.next_i;
    if (elementwise) table[n] = chain.decay_table[row * chain.d_v + place.j + n * place.next_j];
  }
#pragma unroll 1
  for (int first = 0; first < chain.step_count; first += kSteps) {
    const int count = chain.step_count - first < kSteps ? chain.step_count - first : kSteps;
    const HeadTuple* tuples = chain.tuples + static_cast<int64_t>(first) * chain.heads + head;
    Packed<kType> ends[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (inside && s < count) ends[s].Read(tuples[static_cast<int64_t>(s) * chain.heads].state, index);
    }
    SyncThreads();
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < count * width; e += kThreads) {
      const HeadTuple& tuple = tuples[static_cast<int64_t>(e / width) * chain.heads];
      const bool vanished = tuple.form == TransitionForm::kZero;
      const float log = vanished ? 0 : static_cast<const float*>(tuple.transition)[e % width];
      factors[e] = vanished ? -INFINITY : elementwise ? log : expf(log);
    }
    SyncThreads();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (!inside || s >= count) continue;
      const float end_scale = ldexpf(1, tuples[static_cast<int64_t>(s) * chain.heads].state_exponent);
      float end[kNumbers];
      ends[s].Unpack(end);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        const int at = by_row ? place.i + n * place.next_i : elementwise ? place.j + n * place.next_j : 0;
        float factor = factors[s * width + at];
        // A transition of zero also erases infinities and NaN.
        const bool vanished = factor == -INFINITY;
        // Σ dt is infinite if a transition of zero was composed into it. The table's entry may itself be zero, and
        // the product NaN.
        if (elementwise) factor = isinf(factor) ? 0.0f : expf(table[n] * factor);
        numbers[n] = (vanished ? 0.0f : numbers[n] * factor) + end[n] * end_scale;
      }
    }
  }
  WriteNumbers(chain, head, index, inside, numbers);
}

template <DType kType>
void LaunchDecay(const Chain& chain, CudaQueue& queue) {
  const int64_t blocks = CeilDivide(static_cast<int64_t>(chain.d_k) * chain.d_v, kThreads * kNumbers);
  Launch("Compose", DecayKernel<kType>, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(chain.heads)),
         kThreads, sizeof(float) * kSteps * kMaxHeadDim, queue.stream(), chain);
}

}  // namespace

bool DecayFits(const ComposeArgs& args) {
  const LinearShape& shape = args.shape;
  if (NaturalForm(shape.family) == TransitionForm::kDense || args.interiors.empty()) return false;
  if (shape.d_k % kNumbers != 0 || shape.d_v % kNumbers != 0 || shape.rotation.style != RopeStyle::kNone) return false;
  uintptr_t bits = 0;
  for (const TupleView& interior : args.interiors) {
    if (interior.state_dtype != args.interiors.front().state_dtype) return false;
    for (int32_t h = 0; h < shape.heads; ++h) bits |= reinterpret_cast<uintptr_t>(interior.heads[h].state);
  }
  return bits % 16 == 0;
}

void RunDecay(const Chain& chain, DType dtype, CudaQueue& queue) {
  if (dtype == DType::kF32) return LaunchDecay<DType::kF32>(chain, queue);
  if (dtype == DType::kF16) return LaunchDecay<DType::kF16>(chain, queue);
  LaunchDecay<DType::kBF16>(chain, queue);
}

}  // namespace ashlar::kernels::cuda
