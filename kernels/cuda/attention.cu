// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"

namespace ashlar::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 8;       // queries of a block: of one kv head, a token's heads first
constexpr int kKeys = 32;      // keys of a tile: one per lane
constexpr int kPageShare = 2;  // keys and values have separate page tables

// The position to which the pages' keys are rotated.
enum class Keys { kLanded, kUnrotated, kZeroBased };

// A span with its page tables on the device, from the first page that is touched on.
struct Span {
  KeySpan span;
  int64_t first_page[kPageShare];
};

struct Attend {
  AttentionShape shape;
  Keys keys;
  RopeStyle style;
  int32_t pairs;
  float rotation_scale;
  const double* frequencies;
  const Span* spans;
  int32_t span_count;
  int64_t key_count;  // keys of all spans
  int64_t tokens;
  const float* q;
  const int64_t* positions;
  int64_t q_stride;
  int32_t splits;
  int64_t keys_per_split;
  // [splits][rows of all kv heads][OutDim() + 2]: Σ weight × value, the largest score, Σ weight.
  float* parts;
  float *out, *lse;
  int64_t out_stride;
  bool merge;

  __host__ __device__ int group() const { return shape.query_heads / shape.kv_heads; }
  __host__ __device__ int part_width() const { return shape.OutDim() + 2; }
  // Row `row` of a kv head: its token and query head.
  __device__ int64_t TokenOf(int64_t row) const { return row / group(); }
  __device__ int HeadOf(int64_t row, int kv_head) const { return kv_head * group() + static_cast<int>(row % group()); }
  __device__ float* PartOf(int split, int64_t token, int head) const {
    return parts + ((split * tokens + token) * shape.query_heads + head) * part_width();
  }
};

// Number i of R(position) x, where at(i) reads x; the first `start` numbers and the ones after the rotated part are
// unchanged.
template <typename At>
__device__ float Turned(const Attend& attend, int64_t position, int start, int i, At&& at) {
  const float value = at(i);
  const int local = i - start;
  if (local < 0 || local >= 2 * attend.pairs) return value;
  const bool half_split = attend.style == RopeStyle::kHalfSplit;
  const bool second = half_split ? local >= attend.pairs : local % 2 == 1;
  const int pair = half_split ? local % attend.pairs : local / 2;
  const int partner = half_split ? (second ? local - attend.pairs : local + attend.pairs) : local ^ 1;
  const float2 turn = Turn(position, attend.frequencies[pair]);
  return attend.rotation_scale * (value * turn.x + (second ? 1.0f : -1.0f) * at(start + partner) * turn.y);
}

// Number i of a slot's row, its scale applied.
struct SlotRow {
  __device__ SlotRow(const PagedSlots& slots, int64_t first_page, int64_t slot, int head) : dtype(slots.dtype) {
    const int64_t page = slots.page_table[slot / slots.page_tokens - first_page], in_page = slot % slots.page_tokens;
    base = slots.base;
    offset = page * slots.page_stride + in_page * slots.token_stride + head * slots.head_stride;
    if (slots.scales == nullptr) return;
    scale = slots.scales[page * slots.scale_page_stride + in_page * slots.scale_token_stride +
                         head * slots.scale_head_stride];
  }
  __device__ float operator[](int i) const { return scale * Load(dtype, base, offset + i); }

  DType dtype;
  const void* base;
  int64_t offset;
  float scale = 1;
};

// The arrays of a block in shared memory, one after another.
struct Shared {
  __device__ Shared(const Attend& attend, int its_stride) : stride(its_stride) {
    queries = SharedMemory<float>();
    weights = queries + kRows * attend.shape.QueryDim();
    rescale = weights + kRows * kKeys;
    tile = rescale + kRows;
  }
  static __host__ __device__ size_t Floats(const AttentionShape& shape, int stride) {
    return static_cast<size_t>(kRows) * shape.QueryDim() + kRows * kKeys + kRows + static_cast<size_t>(kKeys) * stride;
  }
  // Odd, so that lanes that read one number of each key do so in different banks.
  static __host__ __device__ int Stride(const AttentionShape& shape) {
    const int widest = shape.QueryDim() > shape.value_dim ? shape.QueryDim() : shape.value_dim;
    return widest | 1;
  }

  int stride;
  float *queries, *weights, *rescale, *tile;
};

// One block: kRows queries of one kv head over one split of the keys. A thread holds kDims numbers of each output.
template <int kDims>
class Block {
 public:
  __device__ explicit Block(const Attend& attend)
      : attend_(attend), shared_(attend, Shared::Stride(attend.shape)), first_row_(int64_t{blockIdx.x} * kRows) {
    const int64_t rows = attend.tokens * attend.group() - first_row_;
    rows_ = static_cast<int>(rows < kRows ? rows : kRows);
    for (int r = 0; r < rows_; ++r) {
      const int64_t position = attend.positions[attend.TokenOf(first_row_ + r)];
      earliest_ = r == 0 || position < earliest_ ? position : earliest_;
      latest_ = r == 0 || position > latest_ ? position : latest_;
    }
  }

  __device__ void Run() {
    const int64_t begin = static_cast<int64_t>(blockIdx.z) * attend_.keys_per_split;
    const int64_t end = min64(begin + attend_.keys_per_split, attend_.key_count);
    int64_t first = 0;  // key of the span among all keys
    if (attend_.keys != Keys::kZeroBased) PlaceQueries(0);
    for (int s = 0; s < attend_.span_count; ++s) {
      const Span& span = attend_.spans[s];
      const int64_t from = max64(begin - first, 0), to = min64(end - first, span.span.tokens);
      if (from < to) {
        if (attend_.keys == Keys::kZeroBased) PlaceQueries(span.span.origin);
        for (int64_t key = from; key < to; key += kKeys) {
          const int count = static_cast<int>(min64(to - key, kKeys));
          if (Visible(span.span.position + key, count)) Tile(span, key, count);
        }
      }
      first += span.span.tokens;
    }
    Write();
  }

 private:
  static __device__ int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
  static __device__ int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
  __device__ bool mla() const { return attend_.shape.kind == AttentionKind::kMla; }

  // Returns whether any query sees any of `count` keys from `position` on.
  __device__ bool Visible(int64_t position, int count) const {
    if (position > latest_) return false;
    return attend_.shape.window == 0 || position + count - 1 > earliest_ - attend_.shape.window;
  }

  // The block's queries, rotated to their positions relative to `origin`, and scaled.
  __device__ void PlaceQueries(int64_t origin) {
    const int dim = attend_.shape.QueryDim(), start = mla() ? attend_.shape.key_dim : 0;
    SyncThreads();
    for (int e = static_cast<int>(threadIdx.x); e < kRows * dim; e += kThreads) {
      const int r = e / dim;
      if (r >= rows_) {
        shared_.queries[e] = 0;
        continue;
      }
      const int64_t token = attend_.TokenOf(first_row_ + r);
      const float* q = attend_.q + token * attend_.q_stride +
                       static_cast<int64_t>(attend_.HeadOf(first_row_ + r, static_cast<int>(blockIdx.y))) * dim;
      shared_.queries[e] = attend_.shape.scale * Turned(attend_, attend_.positions[token] - origin, start, e % dim,
                                                        [&](int i) { return q[i]; });
    }
    SyncThreads();
  }

  // Rows [key, key + count) of a span: keys, or values.
  __device__ void LoadTile(const Span& span, int64_t key, int count, bool values) {
    const AttentionShape& shape = attend_.shape;
    const int width = values ? shape.value_dim : shape.QueryDim();
    const int start = mla() ? shape.key_dim : 0, head = static_cast<int>(blockIdx.y);
    for (int e = static_cast<int>(threadIdx.x); e < count * width; e += kThreads) {
      const int row = e / width, i = e % width;
      const int64_t slot = span.span.first_slot + key + row;
      float number;
      if (values) {
        number = SlotRow(span.span.values, span.first_page[1], slot, head)[i];
      } else {
        const bool rotary = mla() && i >= start;  // mla: the second row's part
        const SlotRow from = rotary ? SlotRow(span.span.values, span.first_page[1], slot, head)
                                    : SlotRow(span.span.keys, span.first_page[0], slot, head);
        const auto at = [&](int j) { return from[rotary ? j - start : j]; };
        number =
            attend_.keys == Keys::kUnrotated ? Turned(attend_, span.span.position + key + row, start, i, at) : at(i);
      }
      shared_.tile[row * shared_.stride + i] = number;
    }
  }

  __device__ void Tile(const Span& span, int64_t key, int count) {
    LoadTile(span, key, count, false);
    SyncThreads();
    Score(span.span.position + key, count);
    SyncThreads();
    if (!mla()) {
      LoadTile(span, key, count, true);
      SyncThreads();
    }
    Accumulate(count);
    SyncThreads();
  }

  // Each warp computes the scores of every fourth query, and their weights.
  __device__ void Score(int64_t position, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int dim = attend_.shape.QueryDim();
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int r = warp + 4 * i;
      float score = -INFINITY;
      if (r < rows_ && lane < count) {
        const int64_t at = attend_.positions[attend_.TokenOf(first_row_ + r)], behind = at - (position + lane);
        if (behind >= 0 && (attend_.shape.window == 0 || behind < attend_.shape.window)) {
          const float *q = shared_.queries + r * dim, *k = shared_.tile + lane * shared_.stride;
          score = 0;
          for (int d = 0; d < dim; ++d) score += q[d] * k[d];
        }
      }
      float most = score;
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, ShuffleXor(most, mask));
      most = fmaxf(most, most_[i]);
      // All scores may be −∞ or NaN: then the weights are zero or NaN.
      const float base = most == -INFINITY ? 0 : most;
      const float weight = expf(score - base), rescale = most_[i] == most ? 1 : expf(most_[i] - most);
      float total = weight;
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) total += ShuffleXor(total, mask);
      total_[i] = total_[i] * rescale + total;
      most_[i] = most;
      shared_.weights[r * kKeys + lane] = weight;
      if (lane == 0) shared_.rescale[r] = rescale;
    }
  }

  __device__ void Accumulate(int count) {
    const int width = attend_.shape.OutDim();
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const int d = static_cast<int>(threadIdx.x) + i * kThreads;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum_[i][r] *= shared_.rescale[r];
      if (d >= width) continue;
      for (int key = 0; key < count; ++key) {
        const float value = shared_.tile[key * shared_.stride + d];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum_[i][r] += shared_.weights[r * kKeys + key] * value;
      }
    }
  }

  __device__ void Write() {
    const int width = attend_.shape.OutDim(), lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, kv_head = static_cast<int>(blockIdx.y);
    const auto part = [&](int r) {
      return attend_.PartOf(static_cast<int>(blockIdx.z), attend_.TokenOf(first_row_ + r),
                            attend_.HeadOf(first_row_ + r, kv_head));
    };
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const int d = static_cast<int>(threadIdx.x) + i * kThreads;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows_ && d < width) part(r)[d] = sum_[i][r];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int r = warp + 4 * i;
      if (lane != 0 || r >= rows_) continue;
      part(r)[width] = most_[i];
      part(r)[width + 1] = total_[i];
    }
  }

  const Attend& attend_;
  const Shared shared_;
  const int64_t first_row_;
  int rows_;
  int64_t earliest_ = 0, latest_ = 0;  // positions of the queries
  // For queries warp, warp + 4: the largest score so far, Σ weight.
  float most_[kRows / 4] = {-INFINITY, -INFINITY}, total_[kRows / 4] = {};
  float sum_[kDims][kRows] = {};
};

template <int kDims>
__global__ void __launch_bounds__(kThreads, 3) AttendKernel(const __grid_constant__ Attend attend) {
  Block<kDims>(attend).Run();
}

// One block: the parts of one token and head, and the result of an earlier call.
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ Attend attend) {
  const int64_t token = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y), width = attend.shape.OutDim();
  float* out = attend.out + token * attend.out_stride + static_cast<int64_t>(head) * width;
  float* lse = attend.lse == nullptr ? nullptr : attend.lse + token * attend.shape.query_heads + head;
  const float before = attend.merge ? *lse : -INFINITY;
  float most = before;
  for (int s = 0; s < attend.splits; ++s) most = fmaxf(most, attend.PartOf(s, token, head)[width]);
  if (most == -INFINITY) most = 0;  // all scores are NaN or −∞: the total is zero or NaN
  const float earlier = expf(before - most);
  float total = earlier;
  for (int s = 0; s < attend.splits; ++s) {
    const float* part = attend.PartOf(s, token, head);
    total += expf(part[width] - most) * part[width + 1];
  }
  const bool nothing = total == 0;
  for (int d = static_cast<int>(threadIdx.x); d < width; d += kThreads) {
    float sum = earlier == 0 ? 0 : earlier * out[d];
    for (int s = 0; s < attend.splits; ++s) {
      const float* part = attend.PartOf(s, token, head);
      sum += expf(part[width] - most) * part[d];
    }
    out[d] = nothing ? 0 : sum / total;
  }
  SyncThreads();  // all threads have read the old values
  if (threadIdx.x == 0 && lse != nullptr) *lse = nothing ? -INFINITY : most + logf(total);
}

struct TouchedPages {
  TouchedPages(const PagedSlots& slots, const KeySpan& span)
      : first(span.first_slot / slots.page_tokens),
        count(static_cast<size_t>((span.first_slot + span.tokens - 1) / slots.page_tokens - first + 1)) {}
  int64_t first;
  size_t count;
};

const int32_t* StagePages(PagedSlots& slots, const KeySpan& span, int64_t& first_page, CudaQueue& queue) {
  const TouchedPages pages(slots, span);
  first_page = pages.first;
  return slots.page_table = queue.Stage(slots.page_table + pages.first, pages.count);
}

void StageSpans(const AttendArgs& args, Attend& attend, CudaQueue& queue) {
  const size_t pairs = args.rotation.style == RopeStyle::kNone ? 0 : static_cast<size_t>(args.rotation.rotary_dim) / 2;
  size_t bytes = queue.StagedBytes<double>(pairs) + queue.StagedBytes<Span>(args.spans.size());
  for (const KeySpan& span : args.spans) {
    if (span.tokens == 0) continue;
    bytes += queue.StagedBytes<int32_t>(TouchedPages(span.keys, span).count) +
             queue.StagedBytes<int32_t>(TouchedPages(span.values, span).count);
  }
  queue.Begin(bytes);
  attend.style = args.rotation.style;
  attend.pairs = static_cast<int32_t>(pairs);
  attend.rotation_scale = args.rotation.scale;
  attend.frequencies = queue.Stage(args.rotation.frequencies, pairs);
  const Staged<Span> spans = queue.Stage<Span>(args.spans.size());
  attend.spans = spans.device;
  for (const KeySpan& span : args.spans) {
    if (span.tokens == 0) continue;
    Span& staged = spans.host[attend.span_count++] = {span, {}};
    StagePages(staged.span.keys, span, staged.first_page[0], queue);
    StagePages(staged.span.values, span, staged.first_page[1], queue);
    attend.key_count += span.tokens;
  }
}

// Enough blocks to fill the device, with splits of at least 256 keys.
void Split(Attend& attend, int64_t blocks, CudaQueue& queue) {
  const int64_t wanted = CeilDivide(4 * queue.multiprocessors(), blocks);
  const int64_t most = std::max<int64_t>(1, CeilDivide(attend.key_count, 256));
  attend.keys_per_split = std::max<int64_t>(1, CeilDivide(attend.key_count, std::clamp<int64_t>(wanted, 1, most)));
  attend.splits = static_cast<int32_t>(std::max<int64_t>(1, CeilDivide(attend.key_count, attend.keys_per_split)));
}

Event Run(const AttendArgs& args, Keys keys, CudaQueue& queue) {
  Attend attend = {};
  attend.shape = args.shape;
  attend.keys = keys;
  attend.tokens = args.tokens;
  attend.q = args.q;
  attend.positions = args.positions;
  attend.q_stride = args.q_stride;
  attend.out = args.out;
  attend.lse = args.lse;
  attend.out_stride = args.out_stride;
  attend.merge = args.merge;
  StageSpans(args, attend, queue);
  queue.Upload();
  if (args.tokens == 0) return queue.End();
  const int64_t row_blocks = CeilDivide(args.tokens * attend.group(), kRows);
  Split(attend, row_blocks * args.shape.kv_heads, queue);
  attend.parts = static_cast<float*>(queue.Workspace(
      static_cast<size_t>(attend.splits) * static_cast<size_t>(args.tokens) *
      static_cast<size_t>(args.shape.query_heads) * static_cast<size_t>(attend.part_width()) * sizeof(float)));
  const size_t shared = Shared::Floats(args.shape, Shared::Stride(args.shape)) * sizeof(float);
  if (shared > queue.shared_bytes()) {
    std::fprintf(stderr, "kernels: cuda: attention: shape.key_dim and value_dim take %zu bytes, a block has %zu\n",
                 shared, queue.shared_bytes());
    std::abort();
  }
  const dim3 blocks(static_cast<unsigned>(row_blocks), static_cast<unsigned>(args.shape.kv_heads),
                    static_cast<unsigned>(attend.splits));
  const auto kernel = args.shape.OutDim() <= 2 * kThreads ? AttendKernel<2> : AttendKernel<8>;
  Launch("attention", kernel, blocks, kThreads, shared, queue.stream(), attend);
  Launch("attention", MergeKernel,
         dim3(static_cast<unsigned>(args.tokens), static_cast<unsigned>(args.shape.query_heads)), kThreads, 0,
         queue.stream(), attend);
  return queue.End();
}

}  // namespace

Event AttendLanded(const AttendArgs& args, CudaQueue& queue) {
  return Run(args, Keys::kLanded, queue);
}

Event AttendUnrotated(const AttendArgs& args, CudaQueue& queue) {
  return Run(args, Keys::kUnrotated, queue);
}

Event AttendRotatedQuery(const AttendArgs& args, CudaQueue& queue) {
  return Run(args, Keys::kZeroBased, queue);
}

}  // namespace ashlar::kernels::cuda
