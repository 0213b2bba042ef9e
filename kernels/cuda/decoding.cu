// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/decoding.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tokens.cuh"

namespace ashlar::kernels::cuda {
namespace {

// One request from the view of its blocks. Device pointers.
struct Request {
  const void* const* start = nullptr;  // null: zero
  DType start_dtype = DType::kF32;
  const int32_t* start_exponents = nullptr;
  TokenBuffer buffer;
  int32_t slots = 0;  // number of slots to add to the state
  int64_t first = 0;  // first of the inputs' tokens
  int32_t tokens = 0;
  bool append = false;  // the tokens fill the following slots
  Target target, rounded;
};

__device__ inline int64_t RowOf(const TokenBuffer& buffer, int32_t slot) {
  return static_cast<int64_t>(buffer.page_table[slot / buffer.page_tokens]) * buffer.page_tokens +
         slot % buffer.page_tokens;
}

// A few slots in shared memory, for one block.
template <int kBlocks>
struct SlotTile {
  static constexpr int kRows = Column<kBlocks>::kRows;

  float key[kTileTokens][kRows], decay[kTileTokens][kRows];
  float write[kTileTokens][kColumnsPerBlock];

  __device__ void Load(const Chain& chain, const Place& place, const TokenBuffer& buffer, int32_t first, int count,
                       int gate_width) {
    const int key_heads = chain.heads / chain.group, key_head = place.head / chain.group;
    for (int e = static_cast<int>(threadIdx.x); e < count * kRows; e += kColumnThreads) {
      const int t = e / kRows, i = e % kRows;
      const int64_t row = RowOf(buffer, first + t);
      const bool inside = i < chain.d_k;
      const int64_t gate = (row * chain.heads + place.head) * gate_width + (gate_width == 1 ? 0 : i);
      key[t][i] = inside ? cuda::Load(buffer.dtype, buffer.keys, (row * key_heads + key_head) * chain.d_k + i) : 0.0f;
      decay[t][i] = inside ? expf(buffer.gates[gate]) : 0.0f;
    }
    for (int e = static_cast<int>(threadIdx.x); e < count * kColumnsPerBlock; e += kColumnThreads) {
      const int t = e / kColumnsPerBlock, c = e % kColumnsPerBlock;
      const Place at = place.Sibling(c);
      const int64_t index = (RowOf(buffer, first + t) * chain.heads + place.head) * chain.d_v + at.column;
      write[t][c] = at.inside() ? cuda::Load(buffer.dtype, buffer.writes, index) : 0.0f;
    }
  }
};

// Adds `slots` slots to the state.
template <int kBlocks>
__device__ void TakeIn(const Chain& chain, const Place& place, const TokenBuffer& buffer, int32_t slots, int gate_width,
                       Column<kBlocks>& column) {
  auto& tile = *SharedMemory<SlotTile<kBlocks>>();
#pragma unroll 1
  for (int32_t first = 0; first < slots; first += kTileTokens) {
    const int count = slots - first < kTileTokens ? slots - first : kTileTokens;
    SyncThreads();
    tile.Load(chain, place, buffer, first, count, gate_width);
    SyncThreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      column.Scale(tile.decay[t]);
      column.Add(tile.write[t][threadIdx.x / 8], tile.key[t]);
    }
  }
}

// Writes a token's key and gates to its slot. The threads that compute its write u store u there.
__device__ inline void Append(const Chain& chain, int32_t head, int64_t token, const TokenBuffer& buffer, int32_t slot,
                              int gate_width) {
  const TokenInputs& in = chain.inputs;
  const int64_t row = RowOf(buffer, slot);
  const int key_heads = chain.heads / chain.group, key_head = head / chain.group;
  for (int i = static_cast<int>(threadIdx.x); i < chain.d_k; i += kColumnThreads) {
    if (head % chain.group != 0) continue;
    Store(buffer.dtype, buffer.keys, (row * key_heads + key_head) * chain.d_k + i,
          in.k[token * in.k_stride + static_cast<int64_t>(key_head) * chain.d_k + i]);
  }
  for (int i = static_cast<int>(threadIdx.x); i < gate_width; i += kColumnThreads) {
    float gate = 0;
    if (gate_width > 1 || chain.family == Family::kGdn) {
      gate = in.g[token * in.g_stride + static_cast<int64_t>(head) * gate_width + i];
    } else if (chain.decay_table != nullptr) {
      gate = chain.decay_table[head];
      if (chain.family == Family::kMamba2) gate *= in.beta[token * in.beta_stride + head];
    }
    buffer.gates[(row * chain.heads + head) * gate_width + i] = gate;
  }
}

// One block: columns of one head's state of one request.
template <int kBlocks>
__global__ void __launch_bounds__(kColumnThreads, 2)
    DecodeKernel(const __grid_constant__ Chain chain, const Request* requests, int gate_width) {
  const Request& request = requests[blockIdx.z];
  const Place place = {static_cast<int32_t>(blockIdx.y), false,
                       static_cast<int32_t>(blockIdx.x * kColumnsPerBlock + threadIdx.x / 8), chain.d_v};
  Column<kBlocks> column;
  if (request.start != nullptr) {
    ReadStart(chain, place, request.start_dtype, request.start, request.start_exponents, column);
  }
  TakeIn(chain, place, request.buffer, request.slots, gate_width, column);
  Advance<kBlocks, false>(chain, place, request.first, request.first + request.tokens, column,
                          [&](int64_t token, float write) {
                            if (!request.append || threadIdx.x % 8 != 0 || !place.inside()) return;
                            const auto slot = request.slots + static_cast<int32_t>(token - request.first);
                            const int64_t row = RowOf(request.buffer, slot) * chain.heads + place.head;
                            Store(request.buffer.dtype, request.buffer.writes, row * chain.d_v + place.column, write);
                          });
  for (int32_t t = 0; request.append && blockIdx.x == 0 && t < request.tokens; ++t) {
    Append(chain, place.head, request.first + t, request.buffer, request.slots + t, gate_width);
  }
  if (request.target.heads != nullptr) WriteToMemory(chain, place, request.target, column);
  if (request.rounded.heads != nullptr) WriteToMemory(chain, place, request.rounded, column);
}

template <int kBlocks>
void LaunchDecode(const Chain& chain, const Request* requests, size_t count, int gate_width, CudaQueue& queue) {
  const size_t shared = std::max({sizeof(Tile<kBlocks>), sizeof(SlotTile<kBlocks>), sizeof(Slice<kBlocks>)});
  Launch("decoding", DecodeKernel<kBlocks>,
         dim3(static_cast<unsigned>(CeilDivide(chain.d_v, kColumnsPerBlock)), static_cast<unsigned>(chain.heads),
              static_cast<unsigned>(count)),
         kColumnThreads, shared, queue.stream(), chain, requests, gate_width);
}

// Number of pages of slots that a request uses.
size_t PagesOf(const BufferedRequest& request, int32_t slots) {
  return slots == 0 ? 0 : static_cast<size_t>(CeilDivide(slots, request.buffer.page_tokens));
}

// One call: requests of `tokens` tokens each.
class Decoding {
 public:
  Decoding(const LinearShape& shape, std::span<const BufferedRequest> requests, int32_t tokens, CudaQueue& queue)
      : shape_(shape), queue_(queue), tokens_(tokens) {
    const auto heads = static_cast<size_t>(shape.heads);
    size_t pages = 0;
    for (const BufferedRequest& request : requests) {
      pages += queue.StagedBytes<int32_t>(PagesOf(request, request.buffer.filled + (request.flush ? 0 : tokens)));
    }
    queue.Begin(queue.StagedBytes<Request>(requests.size()) + queue.StagedBytes<Target>(requests.size()) +
                kHeadTables * requests.size() * queue.StagedBytes<void*>(heads) + pages);
    requests_ = queue.Stage<Request>(requests.size());
    narrow_ = queue.Stage<Target>(requests.size());
    chain_ = ChainOf(shape);
  }

  Chain& chain() { return chain_; }

  // Token decoding: applies the filled slots to the state, and writes the state if the request flushes.
  void Add(const BufferedRequest& request) {
    Request& staged = Stage(request, StartOf(request), request.buffer.filled, request.flush);
    if (!request.flush) return;
    staged.target = StageTarget(request.state);
    if (request.rounded.heads != nullptr) staged.rounded = StageTarget(request.rounded);
  }

  // Adds `slots` slots to the state, and writes it to `target`.
  void Add(const BufferedRequest& request, int32_t slots, const StateView& target) {
    Stage(request, request.state, slots, true).target = StageTarget(target);
  }

  Event Run() {
    StageWide();
    queue_.Upload();
    const int gate_width = SlotGateWidth(shape_);
    if (count_ > 0) {
      shape_.d_k <= 128 ? LaunchDecode<4>(chain_, requests_.device, count_, gate_width, queue_)
                        : LaunchDecode<8>(chain_, requests_.device, count_, gate_width, queue_);
    }
    Narrow(chain_, narrow_.device, wide_, queue_);
    return queue_.End();
  }

 private:
  static constexpr size_t kHeadTables =
      3;  // per request: where it starts, where its state is written, and a rounded copy

  Request& Stage(const BufferedRequest& request, const StateView& start, int32_t slots, bool written) {
    Request& staged = requests_.host[count_] = {.buffer = request.buffer,
                                                .slots = slots,
                                                .first = static_cast<int64_t>(count_) * tokens_,
                                                .tokens = tokens_,
                                                .append = tokens_ > 0 && !written};
    ++count_;
    if (start.heads != nullptr) {
      staged.start = queue_.Stage(start.heads, static_cast<size_t>(shape_.heads));
      staged.start_dtype = start.dtype;
      staged.start_exponents = start.exponents;
    }
    staged.buffer.page_table =
        queue_.Stage(request.buffer.page_table, PagesOf(request, slots + (staged.append ? tokens_ : 0)));
    return staged;
  }

  Target StageTarget(const StateView& to) {
    if (to.dtype == DType::kF16) ++wide_;
    return {.heads = queue_.Stage(to.heads, static_cast<size_t>(shape_.heads)),
            .dtype = to.dtype,
            .exponents = to.exponents};
  }

  void StageWide() {
    if (wide_ == 0) return;
    const auto heads = static_cast<size_t>(shape_.heads), count = static_cast<size_t>(wide_);
    const size_t numbers = heads * static_cast<size_t>(shape_.d_k) * static_cast<size_t>(shape_.d_v);
    const size_t largest_bytes = queue_.StagedBytes<uint32_t>(count * heads);
    auto* workspace = static_cast<std::byte*>(queue_.Workspace(largest_bytes + count * numbers * sizeof(float)));
    Check(cudaMemsetAsync(workspace, 0, largest_bytes, queue_.stream()), "workspace");
    size_t next = 0;
    for (size_t r = 0; r < count_; ++r) {
      for (Target* target : {&requests_.host[r].target, &requests_.host[r].rounded}) {
        if (target->heads == nullptr || target->dtype != DType::kF16) continue;
        target->largest = reinterpret_cast<uint32_t*>(workspace) + next * heads;
        target->wide = reinterpret_cast<float*>(workspace + largest_bytes) + next * numbers;
        narrow_.host[next++] = *target;
      }
    }
  }

  const LinearShape& shape_;
  CudaQueue& queue_;
  const int32_t tokens_;
  Chain chain_;
  Staged<Request> requests_;
  Staged<Target> narrow_;
  size_t count_ = 0;
  int32_t wide_ = 0;  // states written as fp16, of a request one at the most: copies are of states of fp32
};

}  // namespace

Event DecodeBuffered(const DecodeBufferedArgs& args, CudaQueue& queue) {
  Decoding decoding(args.shape, args.requests, 1, queue);
  decoding.chain().inputs = args.inputs;
  decoding.chain().out = args.out;
  decoding.chain().out_stride = args.out_stride;
  for (const BufferedRequest& request : args.requests) decoding.Add(request);
  return decoding.Run();
}

Event VerifyDrafts(const VerifyDraftsArgs& args, CudaQueue& queue) {
  Decoding decoding(args.shape, args.requests, args.drafts, queue);
  decoding.chain().inputs = args.inputs;
  decoding.chain().out = args.out;
  decoding.chain().out_stride = args.out_stride;
  for (const BufferedRequest& request : args.requests) decoding.Add(request);
  return decoding.Run();
}

Event RebuildState(const RebuildStateArgs& args, CudaQueue& queue) {
  Decoding decoding(args.shape, {&args.request, 1}, 0, queue);
  decoding.Add(args.request, args.tokens, args.target);
  return decoding.Run();
}

}  // namespace ashlar::kernels::cuda
