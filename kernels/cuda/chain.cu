// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/chain.h"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tokens.cuh"

namespace ashlar::kernels::cuda {
namespace {

constexpr int kTileRows = 16;  // rows of a transition in shared memory at once

// The shared memory of a step that composes an interior.
template <int kBlocks>
struct Factors {
  static constexpr int kRows = Column<kBlocks>::kRows;

  Slice<kBlocks> slice;  // the old columns
  float tile[kTileRows][Slice<kBlocks>::kStride];

  // Row r of the tile is fn(r, i) for i < d_k, else 0.
  template <typename Fn>
  __device__ void Fill(int rows, int d_k, bool rows_together, Fn&& fn) {
    SyncThreads();
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < kTileRows * kRows; e += kColumnThreads) {
      // Neighbouring threads read neighbouring numbers.
      const int r = rows_together ? e / kRows : e % kTileRows, i = rows_together ? e % kRows : e / kTileRows;
      if (r < rows) tile[r][i] = i < d_k ? fn(r, i) : 0.0f;
    }
    SyncThreads();
  }
};

// X ← T X, T dense. All threads of the block take part, here and below.
template <int kBlocks>
__device__ void MultiplyDense(const Chain& chain, DType dtype, const void* transition, Column<kBlocks>& column) {
  auto& shared = *SharedMemory<Factors<kBlocks>>();
  float* own = shared.slice.own();
  SyncThreads();
  column.ForEach([&](int row, float& number) { own[row] = number; });
  column = {};
#pragma unroll 1
  for (int first = 0; first < chain.d_k; first += kTileRows) {
    const int rows = chain.d_k - first < kTileRows ? chain.d_k - first : kTileRows;
    shared.Fill(rows, chain.d_k, chain.value_first, [&](int m, int i) {
      const int64_t row = chain.value_first ? first + m : i, at = chain.value_first ? i : first + m;
      return Load(dtype, transition, row * chain.d_k + at);
    });
#pragma unroll 2
    for (int m = 0; m < rows; ++m) column.Add(own[first + m], shared.tile[m]);
  }
}

// X ← (diag(d) + Aᵀ B) X, a few rows of A and B at a time.
template <int kBlocks>
__device__ void MultiplyLowRank(const Chain& chain, DType dtype, const HeadTuple& tuple, Column<kBlocks>& column) {
  auto& shared = *SharedMemory<Factors<kBlocks>>();
  const float* diagonal = static_cast<const float*>(tuple.transition);
  const void* factors = diagonal + chain.d_k;
  constexpr int kRanks = kTileRows / 2;
  shared.Fill(1, chain.d_k, true, [&](int, int i) { return diagonal[i]; });
  Column<kBlocks> sum = column;
  sum.Scale(shared.tile[0]);
#pragma unroll 1
  for (int first = 0; first < tuple.rank; first += kRanks) {
    const int ranks = tuple.rank - first < kRanks ? tuple.rank - first : kRanks;
    // Row 2r is of A, row 2r + 1 of B.
    shared.Fill(2 * ranks, chain.d_k, true, [&](int r, int i) {
      const int64_t row = (r % 2 == 0 ? 0 : tuple.rank) + first + r / 2;
      return Load(dtype, factors, row * chain.d_k + i);
    });
#pragma unroll 1
    for (int r = 0; r < ranks; ++r) sum.Add(column.Dot(shared.tile[2 * r + 1]), shared.tile[2 * r]);
  }
  column = sum;
}

// X ← T X.
template <int kBlocks, bool kElementwise>
__device__ void Multiply(const Chain& chain, const Place& place, DType dtype, const HeadTuple& tuple,
                         Column<kBlocks>& column) {
  auto& shared = *SharedMemory<Factors<kBlocks>>();
  const float* logs = static_cast<const float*>(tuple.transition);
  switch (tuple.form) {
    case TransitionForm::kZero:
      column = {};
      break;
    case TransitionForm::kScalar:
      column.Scale(expf(logs[0]));
      break;
    case TransitionForm::kDiagonal:
      shared.Fill(1, chain.d_k, true, [&](int, int i) { return expf(logs[i]); });
      column.Scale(shared.tile[0]);
      break;
    case TransitionForm::kElementwise:
      SyncThreads();
      shared.slice.ForEach(false, [&](int row, int c, float& number) {
        const Place at = place.Sibling(c);
        const bool inside = row < chain.d_k && at.inside();
        // Infinite: composed with a transition of zero. The table's number may itself be zero.
        number = !inside || isinf(logs[at.column]) ? 0.0f : expf(DecayAt(chain, at, row) * logs[at.column]);
      });
      SyncThreads();
      column.Scale(shared.slice.own());
      break;
    case TransitionForm::kDense:
      if constexpr (!kElementwise) MultiplyDense(chain, dtype, tuple.transition, column);
      break;
    case TransitionForm::kLowRank:
      if constexpr (!kElementwise) MultiplyLowRank(chain, dtype, tuple, column);
      break;
  }
}

// One block: columns of one head's state, or of its transition.
template <int kBlocks, bool kElementwise>
__global__ void __launch_bounds__(kColumnThreads, 2) ChainKernel(const __grid_constant__ Chain chain) {
  const int state_slices = (chain.d_v + kColumnsPerBlock - 1) / kColumnsPerBlock;
  Place place;
  place.head = static_cast<int32_t>(blockIdx.y);
  place.transition = static_cast<int>(blockIdx.x) >= state_slices;
  place.columns = place.transition ? chain.d_k : chain.d_v;
  place.column = (static_cast<int32_t>(blockIdx.x) - (place.transition ? state_slices : 0)) * kColumnsPerBlock +
                 static_cast<int32_t>(threadIdx.x) / 8;
  Column<kBlocks> column;
  if (place.transition) {
    column.ForEach([&](int row, float& number) { number = row == place.column && place.inside() ? 1.0f : 0.0f; });
  } else if (chain.start != nullptr) {
    ReadStart(chain, place, chain.start_dtype, chain.start, chain.start_exponents, column);
  }
#pragma unroll 1
  for (int s = 0; s < chain.step_count; ++s) {
    const Step& step = chain.steps[s];
    if (step.interior < 0) {
      Advance<kBlocks, kElementwise>(chain, place, step.begin, step.end, column, [](int64_t, float) {});
    } else {
      const HeadTuple& tuple = chain.tuples[static_cast<int64_t>(step.interior) * chain.heads + place.head];
      Multiply<kBlocks, kElementwise>(chain, place, step.transition_dtype, tuple, column);
      if (!place.transition) {
        column.Add(1, ReadColumns<kBlocks>(chain, place, step.state_dtype, tuple.state, ldexpf(1, tuple.state_exponent),
                                           step.position, chain.pairs));
      }
    }
    if (step.checkpoint.heads != nullptr && !place.transition) WriteToMemory(chain, place, step.checkpoint, column);
  }
  WriteToMemory(chain, place, place.transition ? chain.transition : chain.state, column);
}

constexpr int kSumThreads = 256;

// Log decay of row (or column) `at` by one step of a chain.
__device__ double StepLog(const Chain& chain, int32_t head, int at, int32_t interior, int64_t token) {
  const TokenInputs& in = chain.inputs;
  if (interior >= 0) {
    const HeadTuple& tuple = chain.tuples[static_cast<int64_t>(interior) * chain.heads + head];
    if (tuple.form != TransitionForm::kZero) return static_cast<const float*>(tuple.transition)[at];
    // A transition of zero stays zero. Its Σ dt is +∞ for mamba1, whose Σ dt grows as the other families' logarithms
    // fall.
    return chain.family == Family::kMamba1 ? INFINITY : -INFINITY;
  }
  switch (chain.family) {
    case Family::kMamba2:
      return static_cast<double>(chain.decay_table[head]) * in.beta[token * in.beta_stride + head];
    case Family::kMamba1:
      return in.beta[token * in.beta_stride + static_cast<int64_t>(head) * chain.d_v + at];
    case Family::kGla:
      return in.g[token * in.g_stride + static_cast<int64_t>(head) * chain.d_k + at];
    default:
      return chain.decay_table[head];
  }
}

// Sums of logarithms: transitions that are not matrices. Eight warps share the sum.
__global__ void __launch_bounds__(kSumThreads) SumLogs(const __grid_constant__ Chain chain, int width) {
  double* sums = SharedMemory<double>();
  const int thread = static_cast<int>(threadIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int across = width == 1 ? 1 : 32, parts = kSumThreads / across;
  const int at = static_cast<int>(blockIdx.x) * across + thread % across;
  double sum = 0;
  if (at < width) {
    for (int s = 0; s < chain.step_count; ++s) {
      const Step& step = chain.steps[s];
      if (step.interior >= 0) {
        if (s % parts == thread / across) sum += StepLog(chain, head, at, step.interior, 0);
        continue;
      }
      for (int64_t t = step.begin + thread / across; t < step.end; t += parts) {
        sum += StepLog(chain, head, at, -1, t);
      }
    }
  }
  sums[thread] = sum;
  SyncThreads();
  if (thread >= across || at >= width) return;
  for (int p = 1; p < parts; ++p) sum += sums[p * across + thread];
  static_cast<float*>(chain.transition.heads[head])[at] = static_cast<float>(sum);
}

// The least e ≥ 0 with `largest` ≤ 2^(e + 15); 0 if `largest` is not finite.
__device__ int ExponentFor(float largest) {
  if (!isfinite(largest)) return 0;
  const auto bits = FloatBits(largest);
  const int least = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);  // largest ≤ 2^least
  return least > 15 ? least - 15 : 0;
}

__global__ void __launch_bounds__(256) NarrowKernel(const Target* targets, int64_t numbers) {
  const Target& target = targets[blockIdx.z];
  const int64_t head = blockIdx.y;
  const int exponent = ExponentFor(FloatOf(target.largest[head]));
  const float factor = ldexpf(1, -exponent);
  const float* from = target.wide + head * numbers;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numbers;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    Store(DType::kF16, target.heads[head], i, from[i] * factor);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) target.exponents[head] = exponent;
}

template <int kBlocks, bool kElementwise>
void LaunchChain(const Chain& chain, CudaQueue& queue) {
  const size_t shared = std::max(sizeof(Factors<kBlocks>), sizeof(Tile<kBlocks>));
  const bool dense = chain.transition.heads != nullptr && NaturalForm(chain.family) == TransitionForm::kDense;
  const auto slices = static_cast<unsigned>(CeilDivide(chain.d_v, kColumnsPerBlock) +
                                            (dense ? CeilDivide(chain.d_k, kColumnsPerBlock) : 0));
  Launch("chain", ChainKernel<kBlocks, kElementwise>, dim3(slices, static_cast<unsigned>(chain.heads)), kColumnThreads,
         shared, queue.stream(), chain);
}

}  // namespace

bool HasKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, NarrowKernel) == cudaSuccess;
}

void RunChain(const Chain& chain, CudaQueue& queue) {
  const bool elementwise = chain.family == Family::kMamba1;
  if (chain.d_k <= 128) {
    elementwise ? LaunchChain<4, true>(chain, queue) : LaunchChain<4, false>(chain, queue);
  } else {
    elementwise ? LaunchChain<8, true>(chain, queue) : LaunchChain<8, false>(chain, queue);
  }
  const TransitionForm form = NaturalForm(chain.family);
  if (chain.transition.heads == nullptr || form == TransitionForm::kDense) return;
  const int width = form == TransitionForm::kScalar ? 1 : form == TransitionForm::kDiagonal ? chain.d_k : chain.d_v;
  Launch("logarithms", SumLogs, dim3(static_cast<unsigned>(CeilDivide(width, 32)), static_cast<unsigned>(chain.heads)),
         kSumThreads, kSumThreads * sizeof(double), queue.stream(), chain, width);
}

void Narrow(const Chain& chain, const Target* targets, int32_t count, CudaQueue& queue) {
  if (count == 0) return;
  const int64_t numbers = static_cast<int64_t>(chain.d_k) * chain.d_v;
  Launch("narrow", NarrowKernel,
         dim3(static_cast<unsigned>(CeilDivide(numbers, 4096)), static_cast<unsigned>(chain.heads),
              static_cast<unsigned>(count)),
         256, 0, queue.stream(), targets, numbers);
}

}  // namespace ashlar::kernels::cuda
