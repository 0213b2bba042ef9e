// SPDX-License-Identifier: Apache-2.0
#include "kernels/adaptive.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace ashlar::kernels {
namespace {

void Check(bool holds, const char* field) {
  if (holds) return;
  std::fprintf(stderr, "kernels: AdaptTransitions: %s\n", field);
  std::abort();
}

// A square matrix or a few rows of one, fp64, row-major.
using Numbers = std::vector<double>;

double Norm(std::span<const double> a) {
  double sum = 0;
  for (double value : a) sum += value * value;
  return std::sqrt(sum);
}

double Dot(const double* a, const double* b, int32_t n) {
  double sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// a ← a − factor b.
void Subtract(double factor, const double* b, int32_t n, double* a) {
  for (int32_t i = 0; i < n; ++i) a[i] -= factor * b[i];
}

double LargestRowNorm(std::span<const double> a, int32_t n) {
  double largest = 0;
  for (int32_t i = 0; i < n; ++i) largest = std::max(largest, Norm(a.subspan(static_cast<size_t>(i) * n, n)));
  return largest;
}

// A A for a symmetric A.
Numbers Squared(const Numbers& a, int32_t n) {
  Numbers out(a.size());
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = 0; j <= i; ++j) out[i * n + j] = out[j * n + i] = Dot(&a[i * n], &a[j * n], n);
  }
  return out;
}

// An upper bound of ‖E‖₂, computed only as closely as needed to decide whether it exceeds `epsilon`.
double ErrorBound(const Numbers& e, int32_t n, double epsilon) {
  const double frobenius = Norm(e);
  // A row's norm is a lower bound: if it exceeds ε, no closer upper bound will help.
  if (frobenius <= epsilon || LargestRowNorm(e, n) > epsilon) return frobenius;
  return SpectralNormBound(e, n);
}

// M ≈ Bᵀ-weighted rows: an orthonormal basis of M's rows by Gram–Schmidt with pivoting, as long as the remainder is
// larger than `left` (Frobenius). None if that takes more than `most` rows.
struct RowBasis {
  int32_t rank = 0;
  Numbers basis;         // [rank, n], orthonormal rows
  Numbers coefficients;  // [n, rank]: M = coefficients · basis + remainder
};

std::optional<RowBasis> FindRowBasis(Numbers m, int32_t n, double left, int32_t most) {
  RowBasis out;
  Numbers coefficients;  // [rank][n] while the rank grows
  for (;;) {
    double all = 0, largest = -1;
    int32_t pivot = 0;
    for (int32_t i = 0; i < n; ++i) {
      const double square = Dot(&m[i * n], &m[i * n], n);
      all += square;
      if (square > largest) largest = square, pivot = i;
    }
    if (std::sqrt(all) <= left) break;
    if (out.rank == most) return std::nullopt;
    Numbers row(m.begin() + pivot * n, m.begin() + (pivot + 1) * n);
    // Once more against the basis, because the remainder of a row has lost digits.
    for (int32_t r = 0; r < out.rank; ++r) Subtract(Dot(&row[0], &out.basis[r * n], n), &out.basis[r * n], n, &row[0]);
    const double norm = Norm(row);
    if (norm == 0) return std::nullopt;
    for (double& value : row) value /= norm;
    for (int32_t i = 0; i < n; ++i) {
      const double c = Dot(&m[i * n], &row[0], n);
      coefficients.push_back(c);
      Subtract(c, &row[0], n, &m[i * n]);
    }
    out.basis.insert(out.basis.end(), row.begin(), row.end());
    ++out.rank;
  }
  out.coefficients.resize(coefficients.size());
  for (int32_t r = 0; r < out.rank; ++r) {
    for (int32_t i = 0; i < n; ++i) out.coefficients[i * out.rank + r] = coefficients[r * n + i];
  }
  return out;
}

// M ≈ Aᵀ diag(σ) B by singular values, largest first; rows of A and of B are orthonormal.
struct Decomposition {
  Numbers sigma;
  Numbers a, b;  // [rank, n]
};

// One-sided Jacobi on the columns of the coefficients C [n, rank]: C V = U diag(σ), hence M = U diag(σ) Vᵀ basis.
Decomposition Decompose(const RowBasis& rows, int32_t n) {
  const int32_t rank = rows.rank;
  Numbers u(static_cast<size_t>(rank) * n), b = rows.basis;  // columns of C as rows; Vᵀ basis
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t r = 0; r < rank; ++r) u[r * n + i] = rows.coefficients[i * rank + r];
  }
  constexpr int kSweeps = 30;
  constexpr double kConverged = 1e-12;
  double off = 1;
  for (int sweep = 0; sweep < kSweeps && off > kConverged; ++sweep) {
    off = 0;
    for (int32_t p = 0; p < rank; ++p) {
      for (int32_t q = p + 1; q < rank; ++q) {
        double *x = &u[p * n], *y = &u[q * n];
        const double xx = Dot(x, x, n), yy = Dot(y, y, n), xy = Dot(x, y, n);
        if (xx == 0 || yy == 0) continue;
        const double cosine = std::fabs(xy) / std::sqrt(xx * yy);
        off = std::max(off, cosine);
        if (cosine <= kConverged) continue;
        const double zeta = (yy - xx) / (2 * xy);
        const double t = std::copysign(1.0, zeta) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        const auto turn = [c, s, n](double* first, double* second) {
          for (int32_t i = 0; i < n; ++i) {
            const double f = first[i], g = second[i];
            first[i] = c * f - s * g;
            second[i] = s * f + c * g;
          }
        };
        turn(x, y);
        turn(&b[p * n], &b[q * n]);
      }
    }
  }
  std::vector<std::pair<double, int32_t>> order;
  for (int32_t r = 0; r < rank; ++r) order.emplace_back(-Norm({&u[r * n], static_cast<size_t>(n)}), r);
  std::sort(order.begin(), order.end());
  Decomposition out;
  for (const auto& [minus_sigma, r] : order) {
    out.sigma.push_back(-minus_sigma);
    for (int32_t i = 0; i < n; ++i) out.a.push_back(minus_sigma == 0 ? 0 : u[r * n + i] / -minus_sigma);
    out.b.insert(out.b.end(), b.begin() + r * n, b.begin() + (r + 1) * n);
  }
  return out;
}

// Chooses the form of one head's transition, k-first.
class Head {
 public:
  Head(const AdaptArgs& args, int32_t h) : args_(args), n_(args.shape.d_k), t_(static_cast<size_t>(n_) * n_) {
    const bool key_first = args.shape.order == StateOrder::kKeyFirst;
    for (int32_t i = 0; i < n_; ++i) {
      for (int32_t j = 0; j < n_; ++j) t_[i * n_ + j] = args.transition[h][key_first ? i * n_ + j : j * n_ + i];
    }
    if (args.decay != nullptr) decay_.assign(args.decay[h], args.decay[h] + n_);
  }

  AdaptedHead Adapt(void* target) const {
    const double zero = ErrorBound(t_, n_, args_.epsilon);
    if (zero <= args_.epsilon) return {.form = TransitionForm::kZero, .error = zero};
    std::optional<AdaptedHead> best;
    std::vector<std::byte> factors;
    const auto consider = [&](const Numbers& decay) {
      std::vector<std::byte> candidate;
      const std::optional<AdaptedHead> low_rank = LowRank(decay, candidate);
      if (!low_rank || (best && best->rank <= low_rank->rank)) return;
      best = low_rank;
      factors = std::move(candidate);
    };
    const int32_t most = LargestUsefulRank(args_.shape, args_.dtype);
    const bool is_short = args_.tokens <= most;
    if (!decay_.empty() && is_short) consider(decay_);
    if (args_.search) consider(Numbers(n_));
    if (best) {
      std::memcpy(target, factors.data(), factors.size());
      return *best;
    }
    return Dense(target);
  }

 private:
  AdaptedHead Dense(void* target) const {
    Numbers rounding(t_.size());
    const bool key_first = args_.shape.order == StateOrder::kKeyFirst;
    for (int32_t i = 0; i < n_; ++i) {
      for (int32_t j = 0; j < n_; ++j) {
        const int64_t index = key_first ? int64_t{i} * n_ + j : int64_t{j} * n_ + i;
        WriteElement(args_.dtype, target, index, static_cast<float>(t_[i * n_ + j]));
        rounding[i * n_ + j] = t_[i * n_ + j] - ReadElement(args_.dtype, target, index);
      }
    }
    return {.form = TransitionForm::kDense, .error = Norm(rounding)};
  }

  // diag(decay) + Aᵀ B in as few dimensions as ε allows, as it is stored; none if dense is as small.
  std::optional<AdaptedHead> LowRank(const Numbers& decay, std::vector<std::byte>& stored) const {
    Numbers m = t_;
    for (int32_t i = 0; i < n_; ++i) m[i * n_ + i] -= decay[i];
    const int32_t most = LargestUsefulRank(args_.shape, args_.dtype);
    std::optional<RowBasis> rows = FindRowBasis(std::move(m), n_, args_.epsilon / 4, most);
    if (!rows || most == 0) return std::nullopt;
    // Only the decay is left. The form has at least one factor: zeros.
    if (rows->rank == 0) rows = RowBasis{.rank = 1, .basis = Numbers(n_), .coefficients = Numbers(n_)};
    const Decomposition parts = Decompose(*rows, n_);
    // The first rank whose truncation may be small enough; rounding may require a few more.
    int32_t rank = 1;
    while (rank < rows->rank && parts.sigma[rank] > args_.epsilon) ++rank;
    constexpr int kTries = 4;
    for (int i = 0; i < kTries && rank <= rows->rank; ++i, ++rank) {
      Store(decay, parts, rank, stored);
      const double error = ErrorBound(Difference(stored, rank), n_, args_.epsilon);
      if (error <= args_.epsilon) return AdaptedHead{.form = TransitionForm::kLowRank, .rank = rank, .error = error};
    }
    return std::nullopt;
  }

  void Store(const Numbers& decay, const Decomposition& parts, int32_t rank, std::vector<std::byte>& stored) const {
    stored.resize(static_cast<size_t>(TransitionBytes(args_.shape, TransitionForm::kLowRank, rank, args_.dtype)));
    auto* diagonal = reinterpret_cast<float*>(stored.data());
    for (int32_t i = 0; i < n_; ++i) diagonal[i] = static_cast<float>(decay[i]);
    void* factors = diagonal + n_;
    for (int32_t r = 0; r < rank; ++r) {
      const double root = std::sqrt(parts.sigma[r]);
      for (int32_t i = 0; i < n_; ++i) {
        WriteElement(args_.dtype, factors, int64_t{r} * n_ + i, static_cast<float>(root * parts.a[r * n_ + i]));
        WriteElement(args_.dtype, factors, int64_t{rank + r} * n_ + i, static_cast<float>(root * parts.b[r * n_ + i]));
      }
    }
  }

  // T − T̃ of the stored form.
  Numbers Difference(const std::vector<std::byte>& stored, int32_t rank) const {
    const auto* diagonal = reinterpret_cast<const float*>(stored.data());
    const void* factors = diagonal + n_;
    Numbers out = t_, b(n_);
    for (int32_t i = 0; i < n_; ++i) out[i * n_ + i] -= diagonal[i];
    for (int32_t r = 0; r < rank; ++r) {
      for (int32_t j = 0; j < n_; ++j) b[j] = ReadElement(args_.dtype, factors, int64_t{rank + r} * n_ + j);
      for (int32_t i = 0; i < n_; ++i) {
        Subtract(ReadElement(args_.dtype, factors, int64_t{r} * n_ + i), &b[0], n_, &out[i * n_]);
      }
    }
    return out;
  }

  const AdaptArgs& args_;
  const int32_t n_;
  Numbers t_, decay_;
};

}  // namespace

int64_t TransitionBytes(const LinearShape& shape, TransitionForm form, int32_t rank, DType dtype) {
  constexpr int64_t kFloat = sizeof(float);
  const auto element = static_cast<int64_t>(ElementBytes(dtype));
  switch (form) {
    case TransitionForm::kScalar:
      return kFloat;
    case TransitionForm::kDiagonal:
      return kFloat * shape.d_k;
    case TransitionForm::kElementwise:
      return kFloat * shape.d_v;
    case TransitionForm::kDense:
      return element * shape.d_k * shape.d_k;
    case TransitionForm::kLowRank:
      return kFloat * shape.d_k + 2 * element * rank * shape.d_k;
    case TransitionForm::kZero:
      return 0;
  }
  return 0;
}

int32_t LargestUsefulRank(const LinearShape& shape, DType dtype) {
  const int64_t dense = TransitionBytes(shape, TransitionForm::kDense, 0, dtype);
  int32_t rank = shape.d_k / 2;
  while (rank > 0 && TransitionBytes(shape, TransitionForm::kLowRank, rank, dtype) >= dense) --rank;
  return rank;
}

double SpectralNormBound(std::span<const double> a, int32_t n) {
  // G = AᵀA has the same norm as A Aᵀ, whose entries are products of rows.
  Numbers gram(a.size());
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = 0; j <= i; ++j) gram[i * n + j] = gram[j * n + i] = Dot(&a[i * n], &a[j * n], n);
  }
  // ‖A‖₂^{2m} = ‖G^m‖₂ ≤ ‖G^m‖_F, m = 2^kSquarings; the powers are kept at norm 1, their size as a logarithm.
  constexpr int kSquarings = 5;
  double log_norm = 0, m = 1;
  for (int i = 0;; ++i) {
    const double norm = Norm(gram);
    if (!(norm > 0)) return norm;
    log_norm += std::log(norm) / m;
    if (i == kSquarings) break;
    for (double& value : gram) value /= norm;
    gram = Squared(gram, n);
    m *= 2;
  }
  return std::exp(log_norm / 2);
}

void AdaptTransitions(const AdaptArgs& args, Workers* workers, std::span<AdaptedHead> heads, void* const* target) {
  Check(NaturalForm(args.shape.family) == TransitionForm::kDense, "shape.family has no dense transitions");
  Check(args.shape.heads > 0 && heads.size() == static_cast<size_t>(args.shape.heads), "heads: one for each of shape");
  Check(args.shape.d_k > 0 && args.shape.d_k <= kMaxHeadDim, "shape.d_k must lie in 1 … kMaxHeadDim");
  Check(args.transition != nullptr && target != nullptr, "transition and target are needed");
  Check(args.epsilon > 0, "epsilon must be positive");
  Check(args.tokens >= 0, "tokens is negative");
  ParallelFor(workers, args.shape.heads,
              [&](int64_t h) { heads[h] = Head(args, static_cast<int32_t>(h)).Adapt(target[h]); });
}

}  // namespace ashlar::kernels
