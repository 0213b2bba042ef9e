// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/xxh3.cuh"

namespace ashlar::kernels::cuda {
namespace {

using xxh3::kThreads;

// Row `row` (token and head) of unit `unit` on one side.
__device__ inline uint8_t* RowAt(const Move& move, const Side& side, int64_t unit, int64_t row, int element_bytes) {
  if (side.units != nullptr) return static_cast<uint8_t*>(side.units[unit]) + row * move.dim * element_bytes;
  const PagedSlots& slots = side.slots;
  const int64_t position = move.first_position + unit * move.unit_tokens + row / move.heads;
  const int64_t page =
      slots.page_table == nullptr ? 0 : slots.page_table[position / slots.page_tokens - side.first_page];
  const int64_t in_page = slots.page_table == nullptr ? position : position % slots.page_tokens;
  return static_cast<uint8_t*>(slots.base) +
         (page * slots.page_stride + in_page * slots.token_stride + row % move.heads * slots.head_stride) *
             element_bytes;
}
__device__ inline float* ScaleAt(const Move& move, const Side& side, int64_t unit, int64_t row) {
  if (side.units != nullptr) return side.scales[unit] + row;
  const PagedSlots& slots = side.slots;
  const int64_t position = move.first_position + unit * move.unit_tokens + row / move.heads;
  const int64_t page =
      slots.page_table == nullptr ? 0 : slots.page_table[position / slots.page_tokens - side.first_page];
  const int64_t in_page = slots.page_table == nullptr ? position : position % slots.page_tokens;
  return slots.scales + page * slots.scale_page_stride + in_page * slots.scale_token_stride +
         row % move.heads * slots.scale_head_stride;
}

// 8-bit rows with scales, one warp per row: first the rotated row's largest magnitude, then the numbers.
template <DType kType, int kCount>
__device__ void TurnScaledRow(const Move& move, const uint8_t* from, float old_scale, uint8_t* to, float* scale) {
  using Item = Items<kType, kCount>;
  const int lane = static_cast<int>(threadIdx.x) % 32, items = Item::Count(move);
  struct Magnitude {
    float largest;
    __device__ uint8_t operator()(float turned, bool) {
      largest = fmaxf(largest, fabsf(turned));
      return 0;
    }
    __device__ uint8_t operator()(uint8_t bits, bool) { return (*this)(Element<kType>::Decode(bits), false); }
  } magnitude = {0};
#pragma unroll 1
  for (int item = lane; item < items; item += 32) Item::Run(move, item, from, nullptr, magnitude);
  float largest = magnitude.largest;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, ShuffleXor(largest, mask));
  const float new_scale = TurnedScale(move.dtype, old_scale, largest);
  struct Rescale {
    float factor;
    __device__ uint8_t operator()(float turned, bool) const { return Element<kType>::Encode(turned * factor); }
    __device__ uint8_t operator()(uint8_t bits, bool) const { return (*this)(Element<kType>::Decode(bits), false); }
  } rescale = {old_scale / new_scale};
#pragma unroll 1
  for (int item = lane; item < items; item += 32) Item::Run(move, item, from, to, rescale);
  // Every lane has read the old scale, which may be at the same address.
  SyncWarp();
  if (lane == 0) *scale = new_scale;
}

// The unit's bytes in shared memory.
__device__ uint8_t* ReadUnit(const uint8_t* unit, int64_t bytes, uint8_t* image) {
  const int thread = static_cast<int>(threadIdx.x);
  int64_t copied = 0;
  if (reinterpret_cast<uintptr_t>(unit) % 16 == 0) {
    copied = bytes / 16 * 16;
    for (int64_t i = 16 * thread; i < copied; i += 16 * kThreads) CopyAsync16(image + i, unit + i, true);
  }
  for (int64_t i = copied + thread; i < bytes; i += kThreads) image[i] = unit[i];
  CommitCopies();
  WaitForCopies<0>();
  SyncThreads();
  return image;
}

// One block: one unit, or, without hashing, `rows_per_block` of its rows.
template <DType kType, int kCount, bool kRescale>
__global__ void __launch_bounds__(kThreads, 2) MoveKernel(const __grid_constant__ Move move, int64_t rows_per_block) {
  constexpr int kBytes = ElementBytes(kType);
  auto& scratch = *SharedMemory<xxh3::Scratch>();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t unit = blockIdx.x;
  const int64_t left = move.tokens - unit * move.unit_tokens;
  const int64_t rows = (left < move.unit_tokens ? left : move.unit_tokens) * move.heads;
  const int64_t bytes = rows * move.dim * kBytes;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_block;
  const int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
  const bool landing = move.from.units != nullptr;
  const bool scaled = landing ? move.from.scales != nullptr : move.from.slots.scales != nullptr;

  const uint8_t* image = nullptr;
  if (landing && move.checksums != nullptr) {
    const auto* source = static_cast<const uint8_t*>(move.from.units[unit]);
    if (move.through_shared) image = ReadUnit(source, bytes, SharedMemory<uint8_t>() + sizeof(xxh3::Scratch));
    const uint64_t digest = Digest(image != nullptr ? image : source, bytes, scratch);
    if (thread == 0) move.checksums[unit] = digest;
  }
  const auto source_row = [&](int64_t row) -> const uint8_t* {
    return image != nullptr ? image + row * move.dim * kBytes : RowAt(move, move.from, unit, row, kBytes);
  };
  if constexpr (kRescale) {
    for (int64_t row = begin + thread / 32; row < end; row += kThreads / 32) {
      TurnScaledRow<kType, kCount>(move, source_row(row), *ScaleAt(move, move.from, unit, row),
                                   RowAt(move, move.to, unit, row, kBytes), ScaleAt(move, move.to, unit, row));
    }
  } else {
    using Item = Items<kType, kCount>;
    const int items = Item::Count(move);
#pragma unroll 1
    for (int64_t i = thread; i < (end - begin) * items; i += kThreads) {
      const int64_t row = begin + i / items;
      Item::Run(move, static_cast<int>(i % items), source_row(row), RowAt(move, move.to, unit, row, kBytes),
                Plain<kType>{});
    }
    for (int64_t row = begin + thread; scaled && row < end; row += kThreads) {
      *ScaleAt(move, move.to, unit, row) = *ScaleAt(move, move.from, unit, row);
    }
  }
  SyncThreads();
  if (!landing && move.checksums != nullptr) {
    const uint64_t digest = Digest(move.to.units[unit], bytes, scratch);
    if (thread == 0) move.checksums[unit] = digest;
  }
  if (move.scale_checksums != nullptr && scaled) {
    const Side& stored = landing ? move.from : move.to;
    const uint64_t digest = Digest(stored.scales[unit], rows * static_cast<int64_t>(sizeof(float)), scratch);
    if (thread == 0) move.scale_checksums[unit] = digest;
  }
}

// One block: one unit.
__global__ void __launch_bounds__(kThreads) ChecksumKernel(const void* const* units, void* const* targets,
                                                           int64_t bytes, int64_t last_bytes, uint64_t* checksums) {
  const int64_t unit = blockIdx.x;
  const int64_t count = unit + 1 == gridDim.x ? last_bytes : bytes;
  const auto* from = static_cast<const uint8_t*>(units[unit]);
  if (targets != nullptr) {
    // The copy is hashed, because another process may still write to the source.
    auto* to = static_cast<uint8_t*>(targets[unit]);
    const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
    const int64_t wide = aligned ? count / 16 : 0;
    for (int64_t i = threadIdx.x; i < wide; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    for (int64_t i = 16 * wide + threadIdx.x; i < count; i += kThreads) to[i] = from[i];
    SyncThreads();
    from = to;
  }
  const uint64_t digest = Digest(from, count, *SharedMemory<xxh3::Scratch>());
  if (threadIdx.x == 0) checksums[unit] = digest;
}

template <DType kType>
void LaunchMove(const Move& move, bool vectors, dim3 blocks, int64_t rows_per_block, size_t shared,
                cudaStream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(ElementBytes(kType));
  auto kernel = vectors ? MoveKernel<kType, kVector, false> : MoveKernel<kType, 1, false>;
  if constexpr (ElementBytes(kType) == 1) {
    const bool scaled = move.from.units != nullptr ? move.from.scales != nullptr : move.from.slots.scales != nullptr;
    if (scaled && move.pairs > 0) kernel = vectors ? MoveKernel<kType, kVector, true> : MoveKernel<kType, 1, true>;
  }
  Launch("rows", kernel, blocks, kThreads, shared, stream, move, rows_per_block);
}

// Collects whether rows and everything between them consist of whole vectors of 16 bytes.
class Alignment {
 public:
  explicit Alignment(DType dtype) : element_bytes_(static_cast<int64_t>(ElementBytes(dtype))) {}
  void Elements(int64_t count) { bits_ |= static_cast<uintptr_t>(count * element_bytes_); }
  void Pointer(const void* pointer) { bits_ |= reinterpret_cast<uintptr_t>(pointer); }
  void Slots(const PagedSlots& slots) {
    Pointer(slots.base);
    Elements(slots.page_stride);
    Elements(slots.token_stride);
    Elements(slots.head_stride);
  }
  bool Vectors() const { return bits_ % 16 == 0; }

 private:
  const int64_t element_bytes_;
  uintptr_t bits_ = 0;
};

// Shared memory for a unit's image besides the scratch memory, so that several blocks fit on a multiprocessor.
constexpr size_t kLargestImage = 64 << 10;

void RunMove(Move& move, Alignment alignment, CudaQueue& queue) {
  alignment.Elements(move.dim);
  alignment.Elements(2 * move.pairs);
  if (move.style == RopeStyle::kHalfSplit) alignment.Elements(move.pairs);
  const int64_t units = CeilDivide(move.tokens, move.unit_tokens),
                unit_rows = std::min<int64_t>(move.unit_tokens, move.tokens) * move.heads;
  const bool hashed = move.checksums != nullptr || move.scale_checksums != nullptr;
  // Blocks of whole units if they are hashed; otherwise enough blocks to fill the device, with at least 8 rows each.
  const int64_t splits =
      hashed ? 1 : std::clamp<int64_t>(CeilDivide(4 * queue.multiprocessors(), units), 1, CeilDivide(unit_rows, 8));
  const int64_t rows_per_block = CeilDivide(unit_rows, splits);
  const size_t image = static_cast<size_t>(unit_rows) * move.dim * ElementBytes(move.dtype);
  move.through_shared = move.from.units != nullptr && move.checksums != nullptr && image <= kLargestImage;
  const size_t shared = hashed ? sizeof(xxh3::Scratch) + (move.through_shared ? image : 0) : 0;
  const dim3 blocks(static_cast<unsigned>(units), static_cast<unsigned>(CeilDivide(unit_rows, rows_per_block)));
  const auto launch = [&](auto* launcher) {
    launcher(move, alignment.Vectors(), blocks, rows_per_block, shared, queue.stream());
  };
  switch (move.dtype) {
    case DType::kF32:
      return launch(LaunchMove<DType::kF32>);
    case DType::kF16:
      return launch(LaunchMove<DType::kF16>);
    case DType::kBF16:
      return launch(LaunchMove<DType::kBF16>);
    case DType::kF8E4M3:
      return launch(LaunchMove<DType::kF8E4M3>);
    case DType::kF8E5M2:
      return launch(LaunchMove<DType::kF8E5M2>);
  }
}

size_t Pairs(const Rotation& rotation, int64_t delta) {
  return rotation.style == RopeStyle::kNone || delta == 0 ? 0 : static_cast<size_t>(rotation.rotary_dim) / 2;
}

void StageTurns(const Rotation& rotation, int64_t delta, Move& move, CudaQueue& queue) {
  const size_t pairs = Pairs(rotation, delta);
  move.style = rotation.style;
  move.pairs = static_cast<int32_t>(pairs);
  const Staged<float2> turns = queue.Stage<float2>(pairs);
  for (size_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(delta) * rotation.frequencies[i];
    turns.host[i] = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
  }
  move.turns = turns.device;
}

// The part of a page table that a call touches.
struct Pages {
  Pages(const PagedSlots& slots, int64_t first_position, int64_t tokens)
      : first(first_position / slots.page_tokens),
        count(tokens == 0 ? 0 : static_cast<size_t>((first_position + tokens - 1) / slots.page_tokens - first + 1)) {}
  int64_t first;
  size_t count;
};

Side SlotsSide(const PagedSlots& slots, const Pages& pages, CudaQueue& queue) {
  Side side = {.slots = slots, .first_page = pages.first};
  side.slots.page_table = queue.Stage(slots.page_table + pages.first, pages.count);
  return side;
}

Side UnitsSide(const void* const* units, const float* const* scales, int64_t count, Alignment& alignment,
               CudaQueue& queue) {
  const auto table = static_cast<size_t>(count);
  for (size_t u = 0; u < table; ++u) alignment.Pointer(units[u]);
  Side side = {};
  side.units = const_cast<void* const*>(queue.Stage(units, table));
  if (scales != nullptr) side.scales = const_cast<float* const*>(queue.Stage(scales, table));
  return side;
}

}  // namespace

Event RotateKeys(const RotateKeysArgs& args, CudaQueue& queue) {
  queue.Begin(queue.StagedBytes<float2>(Pairs(args.rotation, args.delta)));
  // One page that holds all rows, cut into units as large as a block's minimum.
  const auto side = [&](const void* base, const float* scales) {
    return Side{.slots = {.base = const_cast<void*>(base),
                          .token_stride = args.dim,
                          .page_tokens = 1,
                          .dtype = args.dtype,
                          .scales = const_cast<float*>(scales),
                          .scale_token_stride = 1}};
  };
  Move move = {.from = side(args.source, args.source_scales),
               .to = side(args.target, args.target_scales),
               .tokens = args.rows,
               .unit_tokens = 64,
               .heads = 1,
               .dim = args.dim,
               .dtype = args.dtype};
  StageTurns(args.rotation, args.delta, move, queue);
  queue.Upload();
  Alignment alignment(args.dtype);
  alignment.Pointer(args.source);
  alignment.Pointer(args.target);
  if (args.rows > 0) RunMove(move, alignment, queue);
  return queue.End();
}

Event Land(const LandArgs& args, CudaQueue& queue) {
  const StoredRows& source = args.source;
  const Pages pages(args.target, args.first_position, source.tokens);
  const int64_t units = CeilDivide(source.tokens, source.unit_tokens);
  queue.Begin(2 * queue.StagedBytes<void*>(static_cast<size_t>(units)) + queue.StagedBytes<int32_t>(pages.count) +
              queue.StagedBytes<float2>(Pairs(args.rotation, args.delta)));
  Alignment alignment(source.dtype);
  alignment.Slots(args.target);
  Move move = {.from = UnitsSide(source.units, source.scales, units, alignment, queue),
               .to = SlotsSide(args.target, pages, queue),
               .tokens = source.tokens,
               .first_position = args.first_position,
               .unit_tokens = source.unit_tokens,
               .heads = source.heads,
               .dim = source.dim,
               .dtype = source.dtype,
               .checksums = args.unit_checksums,
               .scale_checksums = source.scales == nullptr ? nullptr : args.scale_checksums};
  StageTurns(args.rotation, args.delta, move, queue);
  queue.Upload();
  if (source.tokens > 0) RunMove(move, alignment, queue);
  return queue.End();
}

Event Gather(const GatherArgs& args, CudaQueue& queue) {
  const Pages pages(args.source, args.first_position, args.tokens);
  const int64_t units = CeilDivide(args.tokens, args.unit_tokens);
  queue.Begin(2 * queue.StagedBytes<void*>(static_cast<size_t>(units)) + queue.StagedBytes<int32_t>(pages.count));
  Alignment alignment(args.source.dtype);
  alignment.Slots(args.source);
  Move move = {.from = SlotsSide(args.source, pages, queue),
               .to = UnitsSide(args.units, args.scales, units, alignment, queue),
               .tokens = args.tokens,
               .first_position = args.first_position,
               .unit_tokens = args.unit_tokens,
               .heads = args.heads,
               .dim = args.dim,
               .dtype = args.source.dtype,
               .checksums = args.unit_checksums,
               .scale_checksums = args.scales == nullptr ? nullptr : args.scale_checksums};
  queue.Upload();
  if (args.tokens > 0) RunMove(move, alignment, queue);
  return queue.End();
}

Event Checksum(const ChecksumArgs& args, CudaQueue& queue) {
  const size_t count = args.units.size();
  queue.Begin(2 * queue.StagedBytes<void*>(count));
  const void* const* units = queue.Stage(args.units.data(), count);
  void* const* targets = args.target == nullptr ? nullptr : queue.Stage(args.target, count);
  queue.Upload();
  if (count > 0) {
    Launch("checksum", ChecksumKernel, dim3(static_cast<unsigned>(count)), kThreads, sizeof(xxh3::Scratch),
           queue.stream(), units, targets, static_cast<int64_t>(args.unit_bytes),
           static_cast<int64_t>(args.last_unit_bytes), args.unit_checksums);
  }
  return queue.End();
}

}  // namespace ashlar::kernels::cuda
