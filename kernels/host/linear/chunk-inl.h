// SPDX-License-Identifier: Apache-2.0
// One chunk of tokens of a head, in chunkwise form (HYPIC equation 2 over several tokens at once): every family but
// mamba1. Included once for every target of Highway.
//
// With G the inclusive sum of g inside the chunk, a number or a vector over keys, and X any columns of [S | T]:
//   A_ij = β_i Σ_d k_id k_jd e^{G_id − G_jd}  (j < i)      P_ij = Σ_d q_id k_jd e^{G_id − G_jd}  (j ≤ i)
//   (I + A) Y = diag(β) (V − (K ⊙ e^G) X)                  O    = (Q ⊙ e^G) X + P Y
//   X ← diag(e^{G_n}) X + K̃ᵀ Y,  K̃_j = k_j ⊙ e^{G_n − G_j}
// Families that do not erase have A = 0 and Y = diag(β) V. V = 0 for the columns of T. Columns of X are independent, so
// X is advanced panel by panel. Differences G_i − G_j are never formed as quotients, which overflow: they grow from
// token to token, by products of e^{g}, all at most 1.

#if defined(ASHLAR_KERNELS_HOST_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#undef ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#else
#define ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/matrix-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

constexpr size_t kChunk = 32;  // tokens; a multiple of kRows. 64 measured a tenth slower: more of A and P
constexpr size_t kMaxDim = RoundUp(kMaxHeadDim, kRows);
constexpr size_t kChunkPanels = (kChunk + kWidth - 1) / kWidth;
constexpr size_t kGramStride = kChunkPanels * kWidth;
constexpr size_t kPanelStride = kMaxDim * kWidth;  // floats from one panel to the next

// The data that a chunk's value heads share: keys, queries and their products.
struct KeyChunk {
  size_t tokens, padded;  // padded: up to a multiple of kRows, with tokens of zeros that change nothing
  size_t d_k, stride;     // stride: d_k up to a multiple of kRows, the distance of rows in k and q
  bool outputs;           // otherwise q and qk are not filled
  HWY_ALIGN float k[kChunk * kMaxDim];
  HWY_ALIGN float q[kChunk * kMaxDim];
  HWY_ALIGN float kk[kChunk * kGramStride];                     // lower triangle of K Kᵀ
  HWY_ALIGN float qk[kChunk * kGramStride];                     // lower triangle of Q Kᵀ
  HWY_ALIGN float keys_by_column[kChunkPanels * kPanelStride];  // Kᵀ in panels of tokens

  void Fill(const TokenInputs& inputs, const LinearShape& shape, int64_t begin, size_t count, int32_t key_head,
            bool with_outputs) {
    tokens = count;
    padded = RoundUp(count, kRows);
    d_k = static_cast<size_t>(shape.d_k);
    stride = RoundUp(d_k, kRows);
    outputs = with_outputs;
    const int64_t offset = int64_t{key_head} * shape.d_k;
    Pack(inputs.k + begin * inputs.k_stride + offset, inputs.k_stride, k);
    if (outputs) Pack(inputs.q + begin * inputs.q_stride + offset, inputs.q_stride, q);
    // With a decay per key, products of keys are computed per head.
    if (DecaysPerKey(shape.family)) return;
    for (size_t p = 0; p * kWidth < padded; ++p) {
      LoadPanelTransposed<F32>(k + p * kWidth * stride, stride, d_k, std::min(kWidth, padded - p * kWidth), 1,
                               keys_by_column + p * kPanelStride);
    }
    if (Erases(shape.family)) Gram(k, kk);
    if (outputs) Gram(q, qk);
  }

 private:
  void Pack(const float* from, int64_t from_stride, float* to) const {
    for (size_t i = 0; i < padded; ++i, to += stride) {
      float* end = i < tokens ? std::copy_n(from + static_cast<int64_t>(i) * from_stride, d_k, to) : to;
      std::fill(end, to + stride, 0.0f);
    }
  }

  void Gram(const float* left, float* gram) const {
    for (size_t i = 0; i < padded; i += kRows) {
      for (size_t p = 0; p * kWidth < i + kRows; ++p) {
        Block<kVecs> block;
        block.SetZero();
        Accumulate<Left::kRowMajor>(block, left + i * stride, stride, keys_by_column + p * kPanelStride, d_k);
        for (size_t r = 0; r < kRows; ++r) {
          for (size_t n = 0; n < kVecs; ++n) {
            hn::Store(block.v[r][n], Tag(), gram + (i + r) * kGramStride + p * kWidth + n * kLanes);
          }
        }
      }
    }
  }
};

// The data of one value head: its gates, and everything they scale. Applies the chunk to panels of X.
struct HeadChunk {
  const KeyChunk* keys;
  bool erases;
  const float *read_keys, *read_queries;    // rows that read X: K and Q, times e^G if the decay differs by key
  HWY_ALIGN float read[kChunk];             // factors of the rows read from X: e^{G_i}, or 1
  HWY_ALIGN float beta[kChunk];             // 0 for padding
  HWY_ALIGN float decay[kMaxDim];           // e^{G_n}, for each row of X
  HWY_ALIGN float a[kChunk * kGramStride];  // −A; only the part below the diagonal is read
  HWY_ALIGN float p[kChunk * kGramStride];  // P, zero above the diagonal
  HWY_ALIGN float writes[kChunkPanels * kPanelStride];  // K̃ᵀ, in panels of tokens
  HWY_ALIGN float decayed_keys[kChunk * kMaxDim];       // memory for read_keys
  HWY_ALIGN float decayed_queries[kChunk * kMaxDim];    // and read_queries

  void Fill(const KeyChunk& key_chunk, const LinearShape& shape, const TokenInputs& inputs, int64_t begin,
            size_t head) {
    keys = &key_chunk;
    erases = Erases(shape.family);
    for (size_t i = 0; i < keys->padded; ++i) {
      beta[i] = i < keys->tokens ? BetaOf(shape, inputs, begin + static_cast<int64_t>(i), head) : 0.0f;
    }
    if (!DecaysPerKey(shape.family)) {
      FillOneDecay(shape, inputs, begin, head);
    } else if (erases) {
      FillDecayPerKey<true>(shape, inputs, begin, head);
    } else if (keys->outputs) {
      FillDecayPerKey<false>(shape, inputs, begin, head);
    } else {
      FillWritesAlone(shape, inputs, begin, head);
    }
  }

  // y: in V, out Y; [padded][kWidth].
  template <size_t N>
  HWY_NOINLINE void Correct(const float* HWY_RESTRICT x, float* HWY_RESTRICT y) const {
    for (size_t i = 0; i < keys->padded; i += kRows) {
      Block<N> c;
      if (!erases) {
        c.Load(y + i * kWidth);
        c.Scale(beta + i);
        c.Store(y + i * kWidth);
        continue;
      }
      c.SetZero();
      Accumulate<Left::kRowMajor>(c, read_keys + i * keys->stride, keys->stride, x, keys->d_k);
      for (size_t r = 0; r < kRows; ++r) {
        const Vec scale = hn::Set(Tag(), -read[i + r]), factor = hn::Set(Tag(), beta[i + r]);
        for (size_t n = 0; n < N; ++n) {
          const Vec v = hn::Load(Tag(), y + (i + r) * kWidth + n * kLanes);
          c.v[r][n] = hn::Mul(factor, hn::MulAdd(scale, c.v[r][n], v));
        }
      }
      Accumulate<Left::kRowMajor>(c, a + i * kGramStride, kGramStride, y, i);
      for (size_t r = 1; r < kRows; ++r) {
        for (size_t s = 0; s < r; ++s) {
          const Vec factor = hn::Set(Tag(), a[(i + r) * kGramStride + i + s]);
          for (size_t n = 0; n < N; ++n) c.v[r][n] = hn::MulAdd(factor, c.v[s][n], c.v[r][n]);
        }
      }
      c.Store(y + i * kWidth);
    }
  }

  template <size_t N>
  HWY_NOINLINE void Output(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, float* HWY_RESTRICT out) const {
    for (size_t i = 0; i < keys->padded; i += kRows) {
      Block<N> c;
      c.SetZero();
      Accumulate<Left::kRowMajor>(c, read_queries + i * keys->stride, keys->stride, x, keys->d_k);
      c.Scale(read + i);
      Accumulate<Left::kRowMajor>(c, p + i * kGramStride, kGramStride, y, i + kRows);
      c.Store(out + i * kWidth);
    }
  }

  template <size_t N>
  HWY_NOINLINE void Update(const float* HWY_RESTRICT y, float* HWY_RESTRICT x) const {
    for (size_t i = 0; i < keys->stride; i += kRows) {
      Block<N> c;
      c.Load(x + i * kWidth);
      c.Scale(decay + i);
      for (size_t t = 0; t < keys->tokens; t += kWidth) {
        Accumulate<Left::kRowMajor>(c, writes + t * kMaxDim + i * kWidth, kWidth, y + t * kWidth,
                                    std::min(kWidth, keys->tokens - t));
      }
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t n = 0; n < N; ++n) c.v[r][n] = Vanish(c.v[r][n]);
      }
      c.Store(x + i * kWidth);
    }
  }

 private:
  // One decay for the whole head: A and P are the shared products times D_ij = e^{G_i − G_j}, K̃ is diag(D_n) K.
  void FillOneDecay(const LinearShape& shape, const TokenInputs& inputs, int64_t begin, size_t head) {
    HWY_ALIGN float d[kGramStride] = {};
    double product = 1;
    for (size_t i = 0; i < keys->padded; ++i) {
      const double log = i < keys->tokens ? LogDecay(shape, inputs, begin + static_cast<int64_t>(i), head) : 0.0;
      const double step = std::exp(log);
      product *= step;
      read[i] = static_cast<float>(product);
      Row(i, static_cast<float>(step), d);
    }
    read_keys = keys->k;
    read_queries = keys->q;
    std::fill(decay, decay + keys->stride, read[keys->padded - 1]);
    for (size_t t = 0; t < keys->padded; t += kWidth) {
      for (size_t c = 0; c < keys->stride; ++c) {
        const size_t row = t * kMaxDim + c * kWidth;
        for (size_t n = 0; n < kWidth; n += kLanes) {
          const Vec key = hn::Load(Tag(), keys->keys_by_column + row + n);
          hn::Store(hn::Mul(hn::Load(Tag(), d + t + n), key), Tag(), writes + row + n);
        }
      }
    }
  }

  // Computes row i of D from row i − 1, and with it row i of the two triangles.
  void Row(size_t i, float step, float* HWY_RESTRICT d) {
    const Vec factor = hn::Set(Tag(), step), minus_beta = hn::Set(Tag(), -beta[i]);
    const size_t row = i * kGramStride;
    const size_t end = RoundUp(i / kRows * kRows + kRows, kLanes);
    for (size_t j = 0; j < i; j += kLanes) {
      hn::Store(Vanish(hn::Mul(factor, hn::Load(Tag(), d + j))), Tag(), d + j);
    }
    d[i] = 1;
    for (size_t j = 0; j < end; j += kLanes) {
      const Vec decays = hn::Load(Tag(), d + j);
      if (erases) {
        hn::Store(hn::Mul(hn::Mul(minus_beta, decays), hn::Load(Tag(), keys->kk + row + j)), Tag(), a + row + j);
      }
      if (keys->outputs) hn::Store(hn::Mul(decays, hn::Load(Tag(), keys->qk + row + j)), Tag(), p + row + j);
    }
  }

  // A decay per key: K̃ grows by one row per token, while all earlier rows decay in place, and A and P are read from it
  // on the way.
  template <bool kErases>
  void FillDecayPerKey(const LinearShape& shape, const TokenInputs& inputs, int64_t begin, size_t head) {
    HWY_ALIGN float step[RoundUp(kMaxDim, kLanes)];
    const size_t d_k = keys->d_k, stride = keys->stride;
    std::fill(decay, decay + stride, 1.0f);
    std::fill(read, read + keys->padded, 1.0f);
    for (size_t t = 0; t < keys->padded; t += kWidth) {
      std::fill(writes + t * kMaxDim, writes + t * kMaxDim + stride * kWidth, 0.0f);
    }
    read_keys = decayed_keys;
    read_queries = decayed_queries;
    for (size_t i = 0; i < keys->tokens; ++i) {
      DecaysOf(GateRow(shape, inputs, begin + static_cast<int64_t>(i), head), d_k, step);
      std::fill(step + d_k, step + stride, 1.0f);
      for (size_t c = 0; c < stride; ++c) {
        const float product = decay[c] * step[c];
        decay[c] = product < kVanished ? 0.0f : product;
        decayed_keys[i * stride + c] = keys->k[i * stride + c] * decay[c];
      }
      for (size_t c = 0; keys->outputs && c < stride; ++c) {
        decayed_queries[i * stride + c] = keys->q[i * stride + c] * decay[c];
      }
      for (size_t j = 0; j <= i; j += kLanes) {
        if (keys->outputs) {
          DecayRows<kErases, true>(i, j, step);
        } else {
          DecayRows<kErases, false>(i, j, step);
        }
      }
    }
    // Tokens of padding read and write nothing.
    const size_t real = keys->tokens, added = keys->padded - real;
    for (float* rows : {decayed_keys, decayed_queries}) std::fill_n(rows + real * stride, added * stride, 0.0f);
    for (float* rows : {a, p}) std::fill_n(rows + real * kGramStride, added * kGramStride, 0.0f);
    for (size_t i = 0; i < real; ++i) {
      // Zeroes the numbers from the last vector written to the end of the block that reads the row.
      const size_t from = RoundUp(i + 1, kLanes), end = RoundUp(i + 1, kRows);
      if (from < end) std::fill(p + i * kGramStride + from, p + i * kGramStride + end, 0.0f);
    }
  }

  // A decay per key, and nothing is read before the end: each row of K̃ is computed once, from the last token
  // backwards, with the decay of all following tokens.
  void FillWritesAlone(const LinearShape& shape, const TokenInputs& inputs, int64_t begin, size_t head) {
    HWY_ALIGN float step[RoundUp(kMaxDim, kLanes)];
    const size_t d_k = keys->d_k, stride = keys->stride;
    float* HWY_RESTRICT rows = decayed_keys;
    std::fill(decay, decay + stride, 1.0f);
    std::fill(rows + keys->tokens * stride, rows + keys->padded * stride, 0.0f);
    for (size_t i = keys->tokens; i-- > 0;) {
      DecaysOf(GateRow(shape, inputs, begin + static_cast<int64_t>(i), head), d_k, step);
      std::fill(step + d_k, step + stride, 1.0f);
      for (size_t c = 0; c < stride; ++c) {
        rows[i * stride + c] = keys->k[i * stride + c] * decay[c];
        const float product = decay[c] * step[c];
        decay[c] = product < kVanished ? 0.0f : product;
      }
    }
    for (size_t t = 0; t < keys->padded; t += kWidth) {
      LoadPanelTransposed<F32>(rows + t * stride, stride, d_k, std::min(kWidth, keys->padded - t), 1,
                               writes + t * kMaxDim);
    }
  }

  // Lets rows j … of K̃ decay by token i, adds row i if it is among them, and reads A_ij … and P_ij ….
  template <bool kErases, bool kOutputs>
  HWY_NOINLINE void DecayRows(size_t i, size_t j, const float* HWY_RESTRICT step) {
    HWY_ALIGN float at[kLanes] = {};
    if (i < j + kLanes) at[i - j] = 1;
    const Vec added = hn::Load(Tag(), at);
    const float* HWY_RESTRICT key = keys->k + i * keys->stride;
    const float* HWY_RESTRICT query = keys->q + i * keys->stride;
    float* HWY_RESTRICT column = writes + j / kWidth * kPanelStride + j % kWidth;
    Vec erased[2] = {hn::Zero(Tag()), hn::Zero(Tag())}, seen[2] = {hn::Zero(Tag()), hn::Zero(Tag())};
    for (size_t c = 0; c < keys->stride; c += 2) {
      for (size_t s = 0; s < 2; ++s, column += kWidth) {
        const Vec factor = hn::Set(Tag(), key[c + s]);
        Vec row = Vanish(hn::Mul(hn::Set(Tag(), step[c + s]), hn::Load(Tag(), column)));
        if constexpr (kErases) erased[s] = hn::MulAdd(factor, row, erased[s]);
        row = hn::MulAdd(added, factor, row);
        if constexpr (kOutputs) seen[s] = hn::MulAdd(hn::Set(Tag(), query[c + s]), row, seen[s]);
        hn::Store(row, Tag(), column);
      }
    }
    const size_t to = i * kGramStride + j;
    if constexpr (kErases) {
      hn::Store(hn::Mul(hn::Set(Tag(), -beta[i]), hn::Add(erased[0], erased[1])), Tag(), a + to);
    }
    if constexpr (kOutputs) hn::Store(hn::Add(seen[0], seen[1]), Tag(), p + to);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
