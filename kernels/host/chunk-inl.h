// One chunk of tokens of a gdn head, in chunkwise form (HYPIC equation 2 over several tokens at once).
// Included once for every target of Highway.
//
// With G the inclusive sum of g inside the chunk, D_ij = e^{G_i − G_j} for j ≤ i, and X any columns of [S | T]:
//   A_ij = β_i (k_i·k_j) D_ij  (j < i)      (I + A) Y = diag(β) (V − diag(e^G) K X)
//   O    = diag(e^G) Q X + (Q Kᵀ ⊙ D) Y     X ← e^{G_n} X + K̃ᵀ Y,  K̃ = diag(D_n) K
// V = 0 for the columns of T. Columns of X never meet, so a panel at a time is advanced. D is built from row to row
// by products of e^{g}, all at most 1: no quotient of exponentials is ever formed.

#if defined(ASHLAR_KERNELS_HOST_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#undef ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#else
#define ASHLAR_KERNELS_HOST_CHUNK_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "kernels/host/panel-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

constexpr size_t kChunk = 32;  // tokens; a multiple of kRows. 64 measured a tenth slower: more of A and Q Kᵀ
constexpr size_t kMaxDim = RoundUp(kMaxHeadDim, kRows);
constexpr size_t kChunkPanels = (kChunk + kWidth - 1) / kWidth;
constexpr size_t kGramStride = kChunkPanels * kWidth;

// Below this a decay is zero: nothing is ever seen of it, and denormal numbers are a hundred times slower.
// Compared so that NaN, which is not below anything, stays NaN.
constexpr float kVanished = 1e-30f;

// What a chunk's value heads share: keys, queries and their products.
struct KeyChunk {
  size_t tokens, padded;  // padded: up to a multiple of kRows, by tokens of zeros that change nothing
  size_t d_k, stride;     // stride: d_k up to a multiple of kRows, the distance of rows in k and q
  bool outputs;           // else q and qk are not filled
  HWY_ALIGN float k[kChunk * kMaxDim];
  HWY_ALIGN float q[kChunk * kMaxDim];
  HWY_ALIGN float kk[kChunk * kGramStride];                   // lower triangle of K Kᵀ
  HWY_ALIGN float qk[kChunk * kGramStride];                   // lower triangle of Q Kᵀ
  HWY_ALIGN float keys_by_column[kMaxHeadDim * kGramStride];  // Kᵀ in panels

  void Fill(const TokenInputs& inputs, const LinearShape& shape, int64_t begin, size_t count, int32_t key_head,
            bool with_outputs) {
    tokens = count;
    padded = RoundUp(count, kRows);
    d_k = static_cast<size_t>(shape.d_k);
    stride = RoundUp(d_k, kRows);
    outputs = with_outputs;
    const int64_t offset = int64_t{key_head} * shape.d_k;
    Pack(inputs.k + begin * inputs.k_stride + offset, inputs.k_stride, k);
    for (size_t p = 0; p * kWidth < padded; ++p) {
      LoadPanelTransposed(k + p * kWidth * stride, stride, d_k, std::min(kWidth, padded - p * kWidth),
                          keys_by_column + p * kWidth * kMaxHeadDim);
    }
    Gram(k, kk);
    if (!outputs) return;
    Pack(inputs.q + begin * inputs.q_stride + offset, inputs.q_stride, q);
    Gram(q, qk);
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
        Accumulate<Left::kRowMajor>(block, left + i * stride, stride, keys_by_column + p * kWidth * kMaxHeadDim, d_k);
        for (size_t r = 0; r < kRows; ++r) {
          for (size_t n = 0; n < kVecs; ++n) {
            hn::Store(block.v[r][n], Tag(), gram + (i + r) * kGramStride + p * kWidth + n * kLanes);
          }
        }
      }
    }
  }
};

// What one value head adds: its gates, and everything they scale. Applies the chunk to panels of X.
struct HeadChunk {
  const KeyChunk* keys;
  float decay;                    // e^{G_n}
  HWY_ALIGN float read[kChunk];   // e^{G_i}
  HWY_ALIGN float minus[kChunk];  // −β_i e^{G_i}
  HWY_ALIGN float beta[kChunk];
  HWY_ALIGN float a[kChunk * kGramStride];  // −A; only what stands below the diagonal is read
  HWY_ALIGN float p[kChunk * kGramStride];  // Q Kᵀ ⊙ D, zero above the diagonal
  HWY_ALIGN float k[kChunk * kMaxDim];      // K̃

  void Fill(const KeyChunk& key_chunk, const TokenInputs& inputs, int64_t begin, int32_t head) {
    keys = &key_chunk;
    HWY_ALIGN float d[kGramStride] = {};
    double product = 1;
    for (size_t i = 0; i < keys->padded; ++i) {
      const bool real = i < keys->tokens;
      const int64_t t = begin + static_cast<int64_t>(i);
      const double step = real ? std::exp(double{inputs.g[t * inputs.g_stride + head]}) : 1.0;
      beta[i] = real ? inputs.beta[t * inputs.beta_stride + head] : 0.0f;
      product *= step;
      read[i] = static_cast<float>(product);
      minus[i] = -beta[i] * read[i];
      Row(i, static_cast<float>(step), d);
    }
    decay = read[keys->padded - 1];
    for (size_t i = 0; i < keys->tokens; ++i) {
      for (size_t c = 0; c < keys->stride; ++c) k[i * keys->stride + c] = d[i] * keys->k[i * keys->stride + c];
    }
  }

  // y: in V, out Y; [padded][kWidth].
  template <size_t N>
  HWY_NOINLINE void Correct(const float* HWY_RESTRICT x, float* HWY_RESTRICT y) const {
    for (size_t i = 0; i < keys->padded; i += kRows) {
      Block<N> c;
      c.SetZero();
      Accumulate<Left::kRowMajor>(c, keys->k + i * keys->stride, keys->stride, x, keys->d_k);
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t n = 0; n < N; ++n) {
          const Vec v = hn::Load(Tag(), y + (i + r) * kWidth + n * kLanes);
          c.v[r][n] = hn::MulAdd(hn::Set(Tag(), minus[i + r]), c.v[r][n], hn::Mul(hn::Set(Tag(), beta[i + r]), v));
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
      Accumulate<Left::kRowMajor>(c, keys->q + i * keys->stride, keys->stride, x, keys->d_k);
      c.Scale(read + i);
      Accumulate<Left::kRowMajor>(c, p + i * kGramStride, kGramStride, y, i + kRows);
      c.Store(out + i * kWidth);
    }
  }

  template <size_t N>
  HWY_NOINLINE void Update(const float* HWY_RESTRICT y, float* HWY_RESTRICT x) const {
    const Vec scale = hn::Set(Tag(), decay), vanished = hn::Set(Tag(), kVanished);
    for (size_t i = 0; i < keys->stride; i += kRows) {
      Block<N> c;
      c.Load(x + i * kWidth);
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t n = 0; n < N; ++n) c.v[r][n] = hn::Mul(scale, c.v[r][n]);
      }
      Accumulate<Left::kColumnMajor>(c, k + i, keys->stride, y, keys->tokens);
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t n = 0; n < N; ++n) c.v[r][n] = hn::IfThenZeroElse(hn::Le(hn::Abs(c.v[r][n]), vanished), c.v[r][n]);
      }
      c.Store(x + i * kWidth);
    }
  }

 private:
  // Makes row i of D of row i − 1, and with it row i of the two triangles.
  void Row(size_t i, float step, float* HWY_RESTRICT d) {
    const Vec factor = hn::Set(Tag(), step), vanished = hn::Set(Tag(), kVanished);
    const Vec minus_beta = hn::Set(Tag(), -beta[i]);
    const size_t row = i * kGramStride;
    const size_t end = RoundUp(i / kRows * kRows + kRows, kLanes);
    for (size_t j = 0; j < i; j += kLanes) {
      const Vec next = hn::Mul(factor, hn::Load(Tag(), d + j));
      hn::Store(hn::IfThenZeroElse(hn::Le(next, vanished), next), Tag(), d + j);
    }
    d[i] = 1;
    for (size_t j = 0; j < end; j += kLanes) {
      const Vec decays = hn::Load(Tag(), d + j);
      hn::Store(hn::Mul(hn::Mul(minus_beta, decays), hn::Load(Tag(), keys->kk + row + j)), Tag(), a + row + j);
      if (keys->outputs) hn::Store(hn::Mul(decays, hn::Load(Tag(), keys->qk + row + j)), Tag(), p + row + j);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
