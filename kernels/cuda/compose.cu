// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/compose.h"
#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {
namespace {

// One block holds 16 rows of Z = Sᵀ per warp along the whole chain: Z ← Z Tᵀ + S_Cᵀ. The operands of a step pass
// through shared memory in slices, several of which are in flight: slice q holds columns 32q … 32q + 31 of T (of its
// rows, value-first) and rows 32q … of the end state. A low-rank transition's slice q holds rows 16q … 16q + 15 of B,
// then of A.
constexpr int kDim = 128, kTileCount = kDim / 8;
constexpr int kSlice = 32, kSlices = kDim / kSlice;
constexpr int kRanks = 16;

template <DType kType, bool kValueFirst>
struct Slot {
  using Element = typename Products<kType>::Element;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));  // elements of one copy
  static constexpr int kStages = sizeof(Element) == 2 ? 8 : 4;
  // Strides that spread a warp's concurrent reads over all banks.
  static constexpr int kShort = kSlice + 8, kLong = kDim + kChunk;
  static constexpr int kTransition = std::max(kValueFirst ? 0 : kDim * kShort, kSlice* kLong);
  static constexpr int kTransitionStride = kValueFirst ? kLong : kShort;

  static __host__ __device__ int StateStride(int rows) { return kValueFirst ? kShort : rows + kChunk; }
  static __host__ __device__ int Elements(int rows) {
    return kTransition + (kValueFirst ? rows : kSlice) * StateStride(rows);
  }
};

__device__ inline int SlicesOf(const Chain& chain, const HeadTuple& tuple) {
  const int slices = (chain.d_k + kSlice - 1) / kSlice, ranks = (tuple.rank + kRanks - 1) / kRanks;
  return tuple.form == TransitionForm::kLowRank && ranks > slices ? ranks : slices;
}

// Begins the copies of one slice after another.
template <DType kType, bool kValueFirst>
class Producer {
  using SlotOf = Slot<kType, kValueFirst>;
  using Element = typename SlotOf::Element;

 public:
  __device__ Producer(const Chain& chain, int32_t head, int first_row, int rows)
      : chain_(chain), head_(head), first_row_(first_row), rows_(rows) {}

  __device__ void Next() {
    if (step_ < chain_.step_count) {
      const HeadTuple& tuple = chain_.tuples[static_cast<int64_t>(step_) * chain_.heads + head_];
      Element* slot = SharedMemory<Element>() + slot_ * SlotOf::Elements(rows_);
      if (tuple.form == TransitionForm::kDense) CopyDense(static_cast<const Element*>(tuple.transition), slot);
      if (tuple.form == TransitionForm::kLowRank) CopyFactors(tuple, slot);
      if (slice_ * kSlice < chain_.d_k) CopyState(static_cast<const Element*>(tuple.state), slot + SlotOf::kTransition);
      if (++slice_ == SlicesOf(chain_, tuple)) {
        slice_ = 0;
        ++step_;
      }
    }
    CommitCopies();
    slot_ = slot_ + 1 == SlotOf::kStages ? 0 : slot_ + 1;
  }

 private:
  // [height, width] of `from`, zeros outside of [inside_height, inside_width]; widths are multiples of a chunk.
  __device__ void CopyMatrix(const Element* from, int from_stride, int height, int width, int inside_height,
                             int inside_width, Element* to, int to_stride) {
    const int chunks = width / SlotOf::kChunk;
    for (int c = static_cast<int>(threadIdx.x); c < height * chunks; c += static_cast<int>(blockDim.x)) {
      const int row = c / chunks, column = c % chunks * SlotOf::kChunk;
      const bool inside = row < inside_height && column < inside_width;
      CopyAsync16(to + row * to_stride + column,
                  inside ? from + static_cast<int64_t>(row) * from_stride + column : from, inside);
    }
  }
  __device__ int Padded() const { return (chain_.d_k + 15) / 16 * 16; }
  __device__ void CopyDense(const Element* transition, Element* slot) {
    const int first = slice_ * kSlice, left = chain_.d_k - first;
    if (kValueFirst) {
      CopyMatrix(transition + static_cast<int64_t>(first) * chain_.d_k, chain_.d_k, kSlice, Padded(), left, chain_.d_k,
                 slot, SlotOf::kLong);
    } else {
      CopyMatrix(transition + first, chain_.d_k, Padded(), kSlice, chain_.d_k, left, slot, SlotOf::kShort);
    }
  }
  __device__ void CopyFactors(const HeadTuple& tuple, Element* slot) {
    const int first = slice_ * kRanks, left = tuple.rank - first;
    if (left <= 0) return;
    const auto* a = reinterpret_cast<const Element*>(static_cast<const float*>(tuple.transition) + chain_.d_k) +
                    static_cast<int64_t>(first) * chain_.d_k;
    const Element* b = a + static_cast<int64_t>(tuple.rank) * chain_.d_k;
    CopyMatrix(b, chain_.d_k, kRanks, kDim, left, chain_.d_k, slot, SlotOf::kLong);
    CopyMatrix(a, chain_.d_k, kRanks, kDim, left, chain_.d_k, slot + kRanks * SlotOf::kLong, SlotOf::kLong);
  }
  __device__ void CopyState(const Element* state, Element* to) {
    const int first = slice_ * kSlice, left = chain_.d_k - first, rows_left = chain_.d_v - first_row_;
    const int stride = SlotOf::StateStride(rows_);
    if (kValueFirst) {
      CopyMatrix(state + static_cast<int64_t>(first_row_) * chain_.d_k + first, chain_.d_k, rows_, kSlice, rows_left,
                 left, to, stride);
    } else {
      CopyMatrix(state + static_cast<int64_t>(first) * chain_.d_v + first_row_, chain_.d_v, kSlice, rows_, left,
                 rows_left, to, stride);
    }
  }

  const Chain& chain_;
  const int32_t head_;
  const int first_row_, rows_;
  int step_ = 0, slice_ = 0, slot_ = 0;
};

// One warp's rows, and its work on a slice that has arrived.
template <DType kType, bool kValueFirst>
class Consumer {
  using SlotOf = Slot<kType, kValueFirst>;
  using Element = typename SlotOf::Element;
  using ProductsOf = Products<kType>;

 public:
  __device__ Consumer(const Chain& chain, int rows) : chain_(chain), rows_(rows) {}

  // One step: `next` waits for the next slice and returns its place.
  template <typename NextSlice>
  __device__ __forceinline__ void Compose(const HeadTuple& tuple, NextSlice&& next) {
    const float end_scale = ldexpf(1, tuple.state_exponent);
    RowScale scale;
    if constexpr (ProductsOf::kScaled) {
      scale = ScaleOf<kTileCount>(z_);
      Scale(z_, scale.up);
    }
    float sum[kTileCount][4] = {};
    if (tuple.form == TransitionForm::kLowRank) AddDiagonal(static_cast<const float*>(tuple.transition), sum);
    if (tuple.form == TransitionForm::kLowRank) {
      const int slices = SlicesOf(chain_, tuple);
#pragma unroll 1
      for (int q = 0; q < slices; ++q) {
        const Element* slot = next();
        if (q * kRanks < tuple.rank) MultiplyLowRank(slot, sum);
        AddEnd(slot + SlotOf::kTransition, q, end_scale, scale, sum);
      }
    } else {
#pragma unroll
      for (int q = 0; q < kSlices; ++q) {
        if (q * kSlice >= chain_.d_k) continue;
        const Element* slot = next();
        if (tuple.form == TransitionForm::kDense) MultiplyDense(slot, q, sum);
        AddEnd(slot + SlotOf::kTransition, q, end_scale, scale, sum);
      }
    }
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) z_[n][i] = sum[n][i] * scale.down[i / 2];
    }
  }

  // fn(row of the block, column, number) for all numbers of this lane.
  template <typename Fn>
  __device__ __forceinline__ void ForEach(Fn&& fn) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fn(first + i / 2 * 8, 8 * n + lane % 4 * 2 + i % 2, z_[n][i]);
    }
  }

 private:
  static __device__ __forceinline__ void Scale(Tiles<kTileCount>& tiles, const float (&factors)[2]) {
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tiles[n][i] *= factors[i / 2];
    }
  }
  // Pairs of tiles that the matrices reach into.
  __device__ int Pairs() const {
    return (chain_.d_k + 15) / 16;
  }

  __device__ __forceinline__ void MultiplyDense(const Element* slot, int q, Tiles<kTileCount>& sum) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = 4 * q + 2 * half;
      const Element* at = slot + 16 * half * (kValueFirst ? SlotOf::kTransitionStride : 1);
      ProductsOf::template Multiply<kValueFirst, kTileCount / 2>(z_[tile], z_[tile + 1], at, SlotOf::kTransitionStride,
                                                                 Pairs(), sum);
    }
  }

  __device__ __forceinline__ void AddDiagonal(const float* diagonal, Tiles<kTileCount>& sum) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column >= chain_.d_k) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = z_[n][i] * diagonal[column + i % 2];
    }
  }

  // sum += (Z Bᵀ) A for sixteen ranks.
  __device__ __forceinline__ void MultiplyLowRank(const Element* slot, Tiles<kTileCount>& sum) {
    float reads[2][4] = {};
#pragma unroll
    for (int n = 0; n < kTileCount; n += 2) {
      ProductsOf::template Multiply<false, 1>(z_[n], z_[n + 1], slot + 8 * n, SlotOf::kLong, 1, reads);
    }
    RowScale scale;
    if constexpr (ProductsOf::kScaled) {
      scale = ScaleOf<2>(reads);
#pragma unroll
      for (int i = 0; i < 8; ++i) reads[i / 4][i % 4] *= scale.up[i % 4 / 2];
    }
#pragma unroll
    for (int p = 0; p < kTileCount / 2; ++p) {
      if (p >= Pairs()) continue;
      float product[2][4] = {};
      ProductsOf::template Multiply<true, 1>(reads[0], reads[1], slot + kRanks * SlotOf::kLong + 16 * p, SlotOf::kLong,
                                             1, product);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[2 * p + i / 4][i % 4] += product[i / 4][i % 4] * scale.down[i % 4 / 2];
    }
  }

  // Adds rows 32q … of the end state; `scale` is the factor by which Z was multiplied.
  __device__ __forceinline__ void AddEnd(const Element* end, int q, float end_scale, const RowScale& scale,
                                         Tiles<kTileCount>& sum) {
    const int stride = SlotOf::StateStride(rows_), first = static_cast<int>(threadIdx.x) / 32 * 16;
    const Element* own = end + (kValueFirst ? first * stride : first);
#pragma unroll
    for (int tile = 0; tile < kTileCount; tile += 2) {
      if (tile / 4 != q || 8 * tile >= chain_.d_k) continue;
      float values[2][4];
      const int column = 8 * tile - q * kSlice;
      ProductsOf::template ReadTiles<!kValueFirst>(own + column * (kValueFirst ? 1 : stride), stride, values[0],
                                                   values[1]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[tile + i / 4][i % 4] += values[i / 4][i % 4] * end_scale * scale.up[i % 4 / 2];
      }
    }
  }

  const Chain& chain_;
  const int rows_;
  float z_[kTileCount][4] = {};
};

// The running state between memory and registers, through shared memory, so that neighbouring threads touch neighbours.
constexpr int kStagingStride = kDim + 4;

template <typename Fn>
__device__ void ForStaged(const Chain& chain, int first_row, int rows, Fn&& fn) {
  float* staging = SharedMemory<float>();
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < rows * chain.d_k; e += static_cast<int>(blockDim.x)) {
    const int row = chain.value_first ? e / chain.d_k : e % rows, column = chain.value_first ? e % chain.d_k : e / rows;
    if (first_row + row >= chain.d_v) continue;
    const int64_t index = chain.value_first ? static_cast<int64_t>(first_row + row) * chain.d_k + column
                                            : static_cast<int64_t>(column) * chain.d_v + first_row + row;
    fn(index, staging[row * kStagingStride + column]);
  }
}

template <DType kType, bool kValueFirst>
__global__ void __launch_bounds__(256, 1) ComposeKernel(const __grid_constant__ Chain chain) {
  using SlotOf = Slot<kType, kValueFirst>;
  const int rows = static_cast<int>(blockDim.x) / 2, first_row = static_cast<int>(blockIdx.x) * rows;
  const auto head = static_cast<int32_t>(blockIdx.y);
  float* staging = SharedMemory<float>();

  Consumer<kType, kValueFirst> consumer(chain, rows);
  const float start_scale = ldexpf(1, chain.start_exponents == nullptr ? 0 : chain.start_exponents[head]);
  ForStaged(chain, first_row, rows, [&](int64_t index, float& number) {
    number = start_scale * Load(chain.start_dtype, chain.start[head], index);
  });
  SyncThreads();
  consumer.ForEach([&](int row, int column, float& number) {
    const bool inside = first_row + row < chain.d_v && column < chain.d_k;
    number = inside ? staging[row * kStagingStride + column] : 0.0f;
  });
  SyncThreads();

  Producer<kType, kValueFirst> producer(chain, head, first_row, rows);
  for (int i = 0; i < SlotOf::kStages - 1; ++i) producer.Next();
  int slot = 0;
  const auto next = [&] {
    WaitForCopies<SlotOf::kStages - 2>();
    // After the barrier all threads see this slice, and have finished the previous one: its slot is free.
    SyncThreads();
    producer.Next();
    const auto* at = SharedMemory<typename SlotOf::Element>() + slot * SlotOf::Elements(rows);
    slot = slot + 1 == SlotOf::kStages ? 0 : slot + 1;
    return at;
  };
#pragma unroll 1
  for (int s = 0; s < chain.step_count; ++s) {
    consumer.Compose(chain.tuples[static_cast<int64_t>(s) * chain.heads + head], next);
  }
  WaitForCopies<0>();
  SyncThreads();

  consumer.ForEach([&](int row, int column, float& number) { staging[row * kStagingStride + column] = number; });
  SyncThreads();
  float largest = 0;
  ForStaged(chain, first_row, rows, [&](int64_t index, float& number) {
    if (chain.state.wide == nullptr) {
      Store(chain.state.dtype, chain.state.heads[head], index, number);
    } else {
      chain.state.wide[static_cast<int64_t>(head) * chain.d_k * chain.d_v + index] = number;
      largest = fmaxf(largest, fabsf(number));
    }
  });
  if (chain.state.wide == nullptr) return;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, ShuffleXor(largest, mask));
  if (threadIdx.x % 32 == 0) AtomicMax(chain.state.largest + head, FloatBits(largest));
}

template <DType kType, bool kValueFirst>
void LaunchCompose(const Chain& chain, CudaQueue& queue) {
  using SlotOf = Slot<kType, kValueFirst>;
  // As many rows per block as a state has, because each block reads the transitions; fewer if there are too few heads
  // to give every multiprocessor a block.
  int rows = 128;
  while (rows > 16 && (rows / 2 >= chain.d_v || chain.heads * CeilDivide(chain.d_v, rows) < queue.multiprocessors())) {
    rows /= 2;
  }
  const size_t slots = SlotOf::kStages * static_cast<size_t>(SlotOf::Elements(rows)) * sizeof(typename SlotOf::Element);
  const size_t staging = static_cast<size_t>(rows) * kStagingStride * sizeof(float);
  Launch("Compose", ComposeKernel<kType, kValueFirst>,
         dim3(static_cast<unsigned>(CeilDivide(chain.d_v, rows)), static_cast<unsigned>(chain.heads)), 2 * rows,
         std::max(slots, staging), queue.stream(), chain);
}

template <DType kType>
void LaunchCompose(const Chain& chain, CudaQueue& queue) {
  chain.value_first ? LaunchCompose<kType, true>(chain, queue) : LaunchCompose<kType, false>(chain, queue);
}

}  // namespace

bool ComposeFits(const ComposeArgs& args) {
  const LinearShape& shape = args.shape;
  if (NaturalForm(shape.family) != TransitionForm::kDense || args.interiors.empty()) return false;
  if (shape.d_k > kDim || shape.d_k % 8 != 0 || shape.d_v % 8 != 0) return false;
  const DType dtype = args.interiors.front().state_dtype;
  uintptr_t bits = 0;
  for (const TupleView& interior : args.interiors) {
    if (interior.state_dtype != dtype || interior.transition_dtype != dtype) return false;
    for (int32_t h = 0; h < shape.heads; ++h) {
      bits |= reinterpret_cast<uintptr_t>(interior.heads[h].transition);
      bits |= reinterpret_cast<uintptr_t>(interior.heads[h].state);
    }
  }
  return bits % 16 == 0;
}

void RunCompose(const Chain& chain, DType dtype, CudaQueue& queue) {
  if (dtype == DType::kF32) return LaunchCompose<DType::kF32>(chain, queue);
  if (dtype == DType::kF16) return LaunchCompose<DType::kF16>(chain, queue);
  LaunchCompose<DType::kBF16>(chain, queue);
}

}  // namespace ashlar::kernels::cuda
