// SPDX-License-Identifier: Apache-2.0
#include "kernels/adaptive.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels {
namespace {

using testing::Random;

// Singular values of a [n, n], largest first: the square roots of AᵀA's eigenvalues, by cyclic Jacobi.
std::vector<double> SingularValues(const std::vector<double>& a, int32_t n) {
  std::vector<double> g(a.size());
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = 0; j < n; ++j) {
      for (int32_t m = 0; m < n; ++m) g[i * n + j] += a[m * n + i] * a[m * n + j];
    }
  }
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (int32_t p = 0; p < n; ++p) {
      for (int32_t q = p + 1; q < n; ++q) {
        if (g[p * n + q] == 0) continue;
        const double theta = (g[q * n + q] - g[p * n + p]) / (2 * g[p * n + q]);
        const double t = std::copysign(1.0, theta) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (int32_t k = 0; k < n; ++k) {
          const double x = g[k * n + p], y = g[k * n + q];
          g[k * n + p] = c * x - s * y;
          g[k * n + q] = s * x + c * y;
        }
        for (int32_t k = 0; k < n; ++k) {
          const double x = g[p * n + k], y = g[q * n + k];
          g[p * n + k] = c * x - s * y;
          g[q * n + k] = s * x + c * y;
        }
      }
    }
  }
  std::vector<double> values;
  for (int32_t i = 0; i < n; ++i) values.push_back(std::sqrt(std::max(0.0, g[i * n + i])));
  std::sort(values.rbegin(), values.rend());
  return values;
}

// One segment of a layer, captured by the reference, with different rates of heads from slow to fast.
class Segment {
 public:
  Segment(Random& random, Family family, StateOrder order, int64_t tokens, double slowest, double fastest)
      : shape_{.family = family, .heads = kHeads, .key_heads = kHeads, .d_k = kDk, .d_v = 8, .order = order} {
    const int32_t gates = GateWidth(shape_), betas = BetaWidth(shape_);
    std::vector<float> k = random.Normals(tokens * kHeads * kDk), v = random.Normals(tokens * kHeads * shape_.d_v);
    for (size_t row = 0; row < k.size(); row += kDk) {
      double norm = 0;
      for (int32_t i = 0; i < kDk; ++i) norm += double{k[row + i]} * k[row + i];
      for (int32_t i = 0; i < kDk; ++i) k[row + i] /= static_cast<float>(std::sqrt(norm));
    }
    std::vector<float> beta = random.Uniforms(tokens * kHeads * betas, 0.1, 0.9), g;
    for (auto& log : decay_) log.assign(kDk, 0);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int32_t h = 0; h < kHeads; ++h) {
        const double rate = slowest * std::pow(fastest / slowest, double(h) / (kHeads - 1));
        for (int32_t i = 0; i < gates; ++i) {
          g.push_back(static_cast<float>(-rate * random.Uniform(0.5, 1.5)));
          for (int32_t c = 0; c < (gates == 1 ? kDk : 1); ++c) decay_[h][i + c] += g.back();
        }
      }
    }
    for (auto& logs : decay_) {
      for (float& log : logs) log = std::exp(log);
    }
    const TokenInputs inputs{.tokens = tokens,
                             .k = k.data(),
                             .v = v.data(),
                             .g = gates == 0 ? nullptr : g.data(),
                             .beta = beta.data(),
                             .k_stride = kHeads * kDk,
                             .v_stride = kHeads * shape_.d_v,
                             .g_stride = kHeads * gates,
                             .beta_stride = kHeads * betas};
    void *transition[kHeads], *state[kHeads];
    for (int32_t h = 0; h < kHeads; ++h) {
      transition_[h].resize(kDk * kDk);
      state_[h].resize(kDk * shape_.d_v);
      transition_pointers_[h] = transition_[h].data();
      decay_pointers_[h] = decay_[h].data();
      transition[h] = transition_[h].data();
      state[h] = state_[h].data();
    }
    const auto queue = Reference().MakeQueue(nullptr);
    Reference()
        .Capture({.shape = shape_, .inputs = inputs, .tuple = {.transition = transition, .state = state}}, *queue)
        .Wait();
  }

  static constexpr int32_t kHeads = 6, kDk = 32;

  AdaptArgs Args(int64_t tokens) const {
    return {.shape = shape_, .transition = transition_pointers_, .decay = decay_pointers_, .tokens = tokens};
  }
  const LinearShape& shape() const { return shape_; }
  // Rows are keys first, fp64.
  std::vector<double> Transition(int32_t h) const {
    std::vector<double> out(kDk * kDk);
    for (int32_t i = 0; i < kDk; ++i) {
      for (int32_t j = 0; j < kDk; ++j) {
        out[i * kDk + j] = transition_[h][shape_.order == StateOrder::kKeyFirst ? i * kDk + j : j * kDk + i];
      }
    }
    return out;
  }

 private:
  LinearShape shape_;
  std::vector<float> transition_[kHeads], state_[kHeads], decay_[kHeads];
  const float* transition_pointers_[kHeads];
  const float* decay_pointers_[kHeads];
};

struct Adapted {
  explicit Adapted(const AdaptArgs& args, Workers* workers = nullptr) : heads(args.shape.heads) {
    const auto bytes = static_cast<size_t>(TransitionBytes(args.shape, TransitionForm::kDense, 0, args.dtype));
    stored.assign(args.shape.heads, std::vector<std::byte>(bytes));
    std::vector<void*> target;
    for (auto& head : stored) target.push_back(head.data());
    AdaptTransitions(args, workers, heads, target.data());
  }

  std::vector<AdaptedHead> heads;
  std::vector<std::vector<std::byte>> stored;
};

// Returns the transition T̃ that a stored head applies, by composing it on the identity: T̃ = T̃ I.
std::vector<double> Stored(const LinearShape& shape, const AdaptedHead& head, const void* stored, DType dtype) {
  LinearShape one = shape;
  one.heads = one.key_heads = 1;
  one.d_v = one.d_k;
  std::vector<float> zero(one.d_k * one.d_k), state(one.d_k * one.d_k);
  for (int32_t i = 0; i < one.d_k; ++i) state[i * one.d_k + i] = 1;
  const HeadTuple tuple{.form = head.form, .rank = head.rank, .transition = stored, .state = zero.data()};
  const TupleView view{.heads = &tuple, .transition_dtype = dtype};
  void* states[] = {state.data()};
  const auto queue = Reference().MakeQueue(nullptr);
  Reference().Compose({.shape = one, .interiors = {&view, 1}, .state = {.heads = states}}, *queue).Wait();
  std::vector<double> out(state.size());
  for (int32_t i = 0; i < one.d_k; ++i) {
    for (int32_t j = 0; j < one.d_k; ++j) {
      out[i * one.d_k + j] = state[one.order == StateOrder::kKeyFirst ? i * one.d_k + j : j * one.d_k + i];
    }
  }
  return out;
}

double ErrorOf(const Segment& segment, const Adapted& adapted, int32_t h, DType dtype) {
  std::vector<double> difference = segment.Transition(h);
  const std::vector<double> stored = Stored(segment.shape(), adapted.heads[h], adapted.stored[h].data(), dtype);
  for (size_t i = 0; i < stored.size(); ++i) difference[i] -= stored[i];
  return SingularValues(difference, Segment::kDk)[0];
}

int32_t RankAbove(const std::vector<double>& singular_values, double bound) {
  return static_cast<int32_t>(
      std::count_if(singular_values.begin(), singular_values.end(), [&](double value) { return value > bound; }));
}

class AdaptiveTest : public ::testing::Test {
 protected:
  const uint64_t seed_ = testing::FreshSeed();
  Random random_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
};

TEST_F(AdaptiveTest, TheBoundIsNeverBelowTheNormAndAtMostATwentiethAbove) {
  for (int32_t n : {1, 2, 7, 32, 48}) {
    for (double falloff : {1.0, 0.5, 0.01}) {
      std::vector<double> a;
      for (int32_t i = 0; i < n * n; ++i) a.push_back(random_.Normal() * std::pow(falloff, i / n) * 1e-3);
      const double norm = SingularValues(a, n)[0], bound = SpectralNormBound(a, n);
      EXPECT_GE(bound, norm * (1 - 1e-9)) << n;
      EXPECT_LE(bound, norm * 1.05) << n;
    }
    // The worst case of the bound: all singular values equal.
    std::vector<double> identity(n * n);
    for (int32_t i = 0; i < n; ++i) identity[i * n + i] = 3;
    EXPECT_LE(SpectralNormBound(identity, n), 3 * 1.05);
    EXPECT_EQ(SpectralNormBound(std::vector<double>(n * n), n), 0);
  }
}

// Every head of every family stays within its bound, in every dtype and order; the reported error is at least the true
// one.
TEST_F(AdaptiveTest, ReportsItsErrorAndKeepsItWithinEpsilon) {
  ThreadPool workers(2);
  for (Family family : {Family::kGdn, Family::kKda, Family::kDeltanet}) {
    for (StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
      for (int64_t tokens : {4, 12, 40, 160}) {
        const Segment segment(random_, family, order, tokens, 1e-3, 1.0);
        for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          AdaptArgs args = segment.Args(tokens);
          args.dtype = dtype;
          args.search = true;
          const Adapted adapted(args, &workers);
          for (int32_t h = 0; h < Segment::kHeads; ++h) {
            const AdaptedHead& head = adapted.heads[h];
            const double error = ErrorOf(segment, adapted, h, dtype);
            EXPECT_LE(error, head.error * (1 + 1e-6) + 1e-7);
            if (head.form == TransitionForm::kDense) {
              EXPECT_LE(head.error, UnitRoundoff(dtype) * Segment::kDk);
            } else {
              EXPECT_LE(head.error, args.epsilon);
            }
            if (head.form == TransitionForm::kLowRank) {
              EXPECT_LE(head.rank, LargestUsefulRank(args.shape, dtype));
              EXPECT_LT(TransitionBytes(args.shape, head.form, head.rank, dtype),
                        TransitionBytes(args.shape, TransitionForm::kDense, 0, dtype));
            }
          }
        }
      }
    }
  }
}

TEST_F(AdaptiveTest, OnlyHeadsWithinEpsilonAreZero) {
  const int64_t tokens = 200;
  const Segment segment(random_, Family::kGdn, StateOrder::kKeyFirst, tokens, 1e-4, 1.0);
  const AdaptArgs args = segment.Args(tokens);
  const Adapted adapted(args);
  for (int32_t h = 0; h < Segment::kHeads; ++h) {
    const double norm = SingularValues(segment.Transition(h), Segment::kDk)[0];
    const bool zero = adapted.heads[h].form == TransitionForm::kZero;
    EXPECT_FALSE(zero && norm > args.epsilon) << h << ": " << norm;
    EXPECT_TRUE(zero || norm * 1.05 > args.epsilon) << h << ": " << norm;
  }
  EXPECT_EQ(adapted.heads[Segment::kHeads - 1].form, TransitionForm::kZero);
  EXPECT_EQ(adapted.heads[0].form, TransitionForm::kDense);
}

// T − decay has one dimension per token: a short segment needs no more, but without the decay it would be dense.
TEST_F(AdaptiveTest, AShortSegmentIsItsDecayAndAFactorPerToken) {
  for (Family family : {Family::kGdn, Family::kKda, Family::kDeltanet}) {
    const int64_t tokens = 5;
    const Segment segment(random_, family, StateOrder::kValueFirst, tokens, 1e-3, 1e-2);
    AdaptArgs args = segment.Args(tokens);
    args.dtype = DType::kF32;
    for (const AdaptedHead& head : Adapted(args).heads) {
      EXPECT_EQ(head.form, TransitionForm::kLowRank);
      EXPECT_LE(head.rank, tokens);
      EXPECT_GT(head.rank, 0);
    }
    args.decay = nullptr;
    for (const AdaptedHead& head : Adapted(args).heads) EXPECT_EQ(head.form, TransitionForm::kDense);
  }
}

// Tokens that erase nothing leave only a decay, for which no matrix need be stored.
TEST_F(AdaptiveTest, APureDecayTakesOneFactor) {
  const LinearShape shape{.family = Family::kKda, .heads = 1, .key_heads = 1, .d_k = 32, .d_v = 4};
  std::vector<float> decay = random_.Uniforms(32, 0.1, 1), transition(32 * 32);
  for (int32_t i = 0; i < 32; ++i) transition[i * 32 + i] = decay[i];
  const float *transition_pointer = transition.data(), *decay_pointer = decay.data();
  const AdaptArgs args{.shape = shape, .transition = &transition_pointer, .decay = &decay_pointer, .tokens = 9};
  const Adapted adapted(args);
  EXPECT_EQ(adapted.heads[0].form, TransitionForm::kLowRank);
  EXPECT_EQ(adapted.heads[0].rank, 1);
  EXPECT_EQ(Stored(shape, adapted.heads[0], adapted.stored[0].data(), args.dtype),
            std::vector<double>(transition.begin(), transition.end()));
}

// A decay per channel leaves few dimensions of a long segment: the ones whose singular values exceed ε, and a few for
// rounding.
TEST_F(AdaptiveTest, ALongSegmentOfKdaKeepsTheDimensionsThatExceedEpsilon) {
  LinearShape shape{.family = Family::kKda, .heads = 1, .key_heads = 1, .d_k = 32, .d_v = 4};
  for (int32_t dimensions : {1, 3, 8}) {
    std::vector<float> transition(32 * 32);
    for (int32_t r = 0; r < dimensions; ++r) {
      const std::vector<float> a = random_.Normals(32), b = random_.Normals(32);
      for (int32_t i = 0; i < 32; ++i) {
        for (int32_t j = 0; j < 32; ++j) transition[i * 32 + j] += 1e-3f * a[i] * b[j];
      }
    }
    const std::vector<double> values = SingularValues({transition.begin(), transition.end()}, 32);
    const float* pointer = transition.data();
    AdaptArgs args{.shape = shape, .transition = &pointer, .tokens = 500, .search = true};
    const AdaptedHead head = Adapted(args).heads[0];
    EXPECT_EQ(head.form, TransitionForm::kLowRank);
    EXPECT_GE(head.rank, RankAbove(values, args.epsilon));
    EXPECT_LE(head.rank, RankAbove(values, args.epsilon) + 1);
    args.search = false;
    EXPECT_EQ(Adapted(args).heads[0].form, TransitionForm::kDense);
  }
}

TEST(AdaptiveDeathTest, NamesTheField) {
  const float* transition = nullptr;
  void* target = nullptr;
  AdaptedHead head;
  AdaptArgs args{.shape = {.family = Family::kRetnet, .heads = 1, .key_heads = 1, .d_k = 4, .d_v = 4},
                 .transition = &transition};
  EXPECT_DEATH(AdaptTransitions(args, nullptr, {&head, 1}, &target), "shape.family");
  args.shape.family = Family::kGdn;
  args.epsilon = 0;
  EXPECT_DEATH(AdaptTransitions(args, nullptr, {&head, 1}, &target), "epsilon");
}

}  // namespace
}  // namespace ashlar::kernels
