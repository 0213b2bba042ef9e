// SPDX-License-Identifier: Apache-2.0
// Runs of tokens on columns of a state: the recurrence, one token after another.
#pragma once

#include "kernels/cuda/columns.cuh"

namespace ashlar::kernels::cuda {

inline constexpr int kTileTokens = 8;  // tokens whose inputs are in shared memory at once

// mamba1's A.
__device__ inline float DecayAt(const Chain& chain, const Place& place, int row) {
  return chain.decay_table[(static_cast<int64_t>(place.head) * chain.d_k + row) * chain.d_v + place.column];
}

// Inputs of a few tokens in shared memory, for one block.
template <int kBlocks>
struct Tile {
  static constexpr int kRows = Column<kBlocks>::kRows;

  float key[kTileTokens][kRows], query[kTileTokens][kRows];
  float decay[kTileTokens][kRows];  // gla, kda: e^g
  float value[kTileTokens][kColumnsPerBlock];
  float step[kTileTokens][kColumnsPerBlock];  // mamba1: dt
  float factor[kTileTokens];                  // decay of the whole state
  float beta[kTileTokens];

  __device__ void Load(const Chain& chain, const Place& place, int64_t first, int count) {
    const int thread = static_cast<int>(threadIdx.x);
    const TokenInputs& in = chain.inputs;
    const int64_t key_offset = static_cast<int64_t>(place.head / chain.group) * chain.d_k;
    const bool by_row = chain.family == Family::kGla || chain.family == Family::kKda;
    for (int e = thread; e < count * kRows; e += kColumnThreads) {
      const int t = e / kRows, i = e % kRows;
      const bool inside = i < chain.d_k;
      key[t][i] = inside ? in.k[(first + t) * in.k_stride + key_offset + i] : 0.0f;
      query[t][i] = inside && chain.out != nullptr ? in.q[(first + t) * in.q_stride + key_offset + i] : 0.0f;
      if (!by_row) continue;
      const int64_t gate = (first + t) * in.g_stride + static_cast<int64_t>(place.head) * chain.d_k + i;
      decay[t][i] = inside ? expf(in.g[gate]) : 0.0f;
    }
    const int slice = place.column - thread / 8;  // the block's first column
    for (int e = thread; e < count * kColumnsPerBlock; e += kColumnThreads) {
      const int t = e / kColumnsPerBlock, c = e % kColumnsPerBlock;
      const int64_t column = static_cast<int64_t>(place.head) * chain.d_v + slice + c;
      const bool inside = !place.transition && slice + c < chain.d_v;
      value[t][c] = inside ? in.v[(first + t) * in.v_stride + column] : 0.0f;
      step[t][c] = inside && chain.family == Family::kMamba1 ? in.beta[(first + t) * in.beta_stride + column] : 0.0f;
    }
    if (thread < count) LoadGates(chain, place.head, first + thread, thread);
  }

  __device__ void LoadGates(const Chain& chain, int32_t head, int64_t token, int t) {
    const TokenInputs& in = chain.inputs;
    const bool one_beta = chain.family == Family::kMamba2 || Erases(chain.family);
    beta[t] = one_beta ? in.beta[token * in.beta_stride + head] : 1.0f;
    factor[t] = 1;
    if (chain.family == Family::kGdn) factor[t] = expf(in.g[token * in.g_stride + head]);
    if (chain.family == Family::kRetnet || chain.family == Family::kLightning)
      factor[t] = expf(chain.decay_table[head]);
    if (chain.family == Family::kMamba2) factor[t] = expf(chain.decay_table[head] * beta[t]);
  }
};

// X ← T_t X + u_t for each token t of [begin, end), and its output. wrote(t, u): the value that this column receives at
// t's key.
template <int kBlocks, bool kElementwise, typename Wrote>
__device__ void Advance(const Chain& chain, const Place& place, int64_t begin, int64_t end, Column<kBlocks>& column,
                        Wrote&& wrote) {
  using TileOf = Tile<kBlocks>;
  TileOf& tile = *SharedMemory<TileOf>();
  const int thread = static_cast<int>(threadIdx.x);
  const bool by_row = chain.family == Family::kGla || chain.family == Family::kKda, erases = Erases(chain.family);
  Column<kBlocks> table;  // mamba1: A
  if constexpr (kElementwise) {
    auto& slice = *SharedMemory<Slice<kBlocks>>();
    SyncThreads();
    slice.ForEach(false, [&](int row, int c, float& number) {
      const Place at = place.Sibling(c);
      number = row < chain.d_k && at.inside() ? DecayAt(chain, at, row) : 0.0f;
    });
    SyncThreads();
    table.Add(1, slice.own());
  }
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kTileTokens) {
    const int count = static_cast<int>(end - first < kTileTokens ? end - first : kTileTokens);
    SyncThreads();
    tile.Load(chain, place, first, count);
    SyncThreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float step = tile.step[t][thread / 8];
      if constexpr (kElementwise) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) column.x[b][e] *= expf(table.x[b][e] * step);
        }
      } else if (by_row) {
        column.Scale(tile.decay[t]);
      } else {
        column.Scale(tile.factor[t]);
      }
      float write = tile.value[t][thread / 8];
      if (erases) write -= column.Dot(tile.key[t]);
      write *= kElementwise ? step : tile.beta[t];
      column.Add(write, tile.key[t]);
      wrote(first + t, write);
      if (chain.out == nullptr || place.transition) continue;
      const float read = column.Dot(tile.query[t]);
      if (thread % 8 == 0 && place.inside()) {
        chain.out[(first + t) * chain.out_stride + static_cast<int64_t>(place.head) * chain.d_v + place.column] = read;
      }
    }
  }
}

}  // namespace ashlar::kernels::cuda
