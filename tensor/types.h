// SPDX-License-Identifier: Apache-2.0
// Basic types of cached tensors: element types, stored forms of keys, families of linear layers, stored forms of
// transitions and states. The contract (proto/) and the mathematics (kernels/) both use them.
//
// The numbers are part of the layout's canonical encoding and of the object format (docs/formats.md): never reuse one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ashlar {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3, kF8E4M3 = 4, kF8E5M2 = 5 };

// Returns 0 for an unknown type.
constexpr size_t ElementBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return 1;
  }
  return 0;
}

enum class AttentionKind : uint8_t {
  kGqa = 1,  // keys [kv_heads, key_dim], values [kv_heads, value_dim]
  // one latent row per token is both key and value; a second row, shared by all heads, is the rotary key part
  kMla = 2,
};

// The pairs of dimensions that are rotated together: i with i + rotary_dim / 2, or 2i with 2i + 1.
enum class RopeStyle : uint8_t { kNone = 0, kHalfSplit = 1, kInterleaved = 2 };

// The stored form of keys: rotated as if their text began at position 0, or not rotated.
enum class StoredKeys : uint8_t { kZeroBased = 1, kUnrotated = 2 };

// The recurrence of a family: its transition T_t and write u_t for a token (HYPIC §4.2). The decay is applied before
// the erase and scales only the old state.
enum class Family : uint8_t {
  kRetnet = 1,     // T = e^{d} I, d = decay_table[head];             u = k vᵀ
  kLightning = 2,  // like kRetnet
  kMamba2 = 3,     // T = e^{d β} I, d = decay_table[head], β = dt;   u = β k vᵀ
  kMamba1 = 4,     // T[i, j] = e^{d[i, j] β[j]}, elementwise, β = dt[j]; u[i, j] = β[j] k[i] v[j]
  kGla = 5,        // T = diag(e^{g}), g ∈ R^{d_k};                   u = k vᵀ
  kDeltanet = 6,   // T = I − β k kᵀ;                                 u = β k vᵀ
  kGdn = 7,        // T = e^{g} (I − β k kᵀ);                         u = β k vᵀ
  kKda = 8,        // T = (I − β k kᵀ) diag(e^{g}), g ∈ R^{d_k};      u = β k vᵀ
};

// The stored form of a transition. Scalar and diagonal decays are stored as logarithms: products become sums and never
// underflow. Layouts declare one of the first four. Single heads of a dense layer may be stored as kLowRank or kZero.
enum class TransitionForm : uint8_t {
  kScalar = 1,       // one fp32: T = e^{x} I
  kDiagonal = 2,     // [d_k] fp32: T = diag(e^{x})
  kDense = 3,        // [d_k, d_k] in the tuple's dtype and the state's order
  kElementwise = 4,  // [d_v] fp32, Σ dt: T[i, j] = e^{decay_table[i, j] x[j]}, multiplied element by element
  // [d_k] fp32 d, then [rank, d_k] A and [rank, d_k] B in the tuple's dtype: T = diag(d) + Aᵀ B. d is not a logarithm;
  // a fully decayed entry is 0
  kLowRank = 5,
  kZero = 6,  // T = 0; nothing is stored
};

// The form of a family's transitions if their magnitude is unknown.
constexpr TransitionForm NaturalForm(Family family) {
  switch (family) {
    case Family::kRetnet:
    case Family::kLightning:
    case Family::kMamba2:
      return TransitionForm::kScalar;
    case Family::kGla:
      return TransitionForm::kDiagonal;
    case Family::kMamba1:
      return TransitionForm::kElementwise;
    case Family::kDeltanet:
    case Family::kGdn:
    case Family::kKda:
      return TransitionForm::kDense;
  }
  return TransitionForm::kZero;
}
// Returns whether tokens erase what their key reads (the delta rule). These families need β in about [0, 1]; mamba's β
// is dt.
constexpr bool Erases(Family family) {
  return family == Family::kDeltanet || family == Family::kGdn || family == Family::kKda;
}

// The order of a state in memory. kKeyFirst: S is [d_k, d_v], and a transition acts from the left, S' = T S.
// kValueFirst: the state is Sᵀ, [d_v, d_k]; a dense transition is stored as Tᵀ and acts from the right, Sᵀ' = Sᵀ Tᵀ.
// Low-rank factors, diagonals and decay tables are the same in both.
enum class StateOrder : uint8_t { kKeyFirst = 1, kValueFirst = 2 };

// The order of a convolution tail in memory: [conv_kernel − 1, channels] or [channels, conv_kernel − 1]. The inputs of
// the oldest token come first in both.
enum class TailOrder : uint8_t { kTokenFirst = 1, kChannelFirst = 2 };

}  // namespace ashlar
