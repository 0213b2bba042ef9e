// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench transitions`: bytes and composition time saved by storing transitions as zero, low rank or dense, and
// the error, over decay and segment length.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "kernels/adaptive.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/testing/names.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

constexpr int32_t kHeads = 32, kDim = 128;
constexpr int kChain = 4;  // segments composed, each with separate tuples
constexpr DType kStored = DType::kF16;
constexpr int64_t kLengths[] = {64, 128, 256, 512, 1024, 2048, 4096};

struct Point {
  Family family;
  bool correlated;  // keys share a direction: their mean cosine is 0.8
  double rate;      // mean log decay per token; 0: as flash-linear-attention initialises its layers
  int64_t tokens;
};

kernels::LinearShape ShapeOf(Family family) {
  return {.family = family, .heads = kHeads, .key_heads = kHeads, .d_k = kDim, .d_v = kDim};
}

// Log decays of one layer: A ~ U(0, 16) per head, dt log-uniform in [1e-3, 0.1] per head (gdn) or channel (kda), varied
// from token to token; or one mean rate for all heads, in kda spread over a factor of ten among channels.
class Gates {
 public:
  Gates(const Point& point, std::mt19937_64& random) : random_(random) {
    const int32_t width = kernels::GateWidth(ShapeOf(point.family));
    std::uniform_real_distribution<double> unit;
    for (int32_t h = 0; h < kHeads; ++h) {
      const double a = 16 * unit(random);
      for (int32_t i = 0; i < width; ++i) {
        const double dt = std::pow(10.0, -3 + 2 * unit(random));
        const double spread = width == 1 ? 1 : std::pow(10.0, unit(random) - 0.5);
        means_.push_back(point.rate == 0 ? a * dt : point.rate * spread);
      }
    }
  }

  std::vector<float> Draw(int64_t tokens) {
    std::uniform_real_distribution<double> around(0.5, 1.5);
    std::vector<float> g;
    for (int64_t t = 0; t < tokens; ++t) {
      for (double mean : means_) g.push_back(static_cast<float>(-mean * around(random_)));
    }
    return g;
  }

 private:
  std::mt19937_64& random_;
  std::vector<double> means_;
};

// One segment's tuple: dense and fp32 as captured, dense and fp16, and adapted.
struct Segment {
  Segment(const Point& point, Gates& gates, std::mt19937_64& random, const kernels::Kernels& host,
          kernels::Queue& queue, kernels::Workers& workers) {
    Capture(point, gates, random, host, queue);
    std::vector<const float*> transition, decay;
    std::vector<void*> target;
    const auto bytes = static_cast<size_t>(kernels::TransitionBytes(shape, TransitionForm::kDense, 0, kStored));
    for (int32_t h = 0; h < kHeads; ++h) {
      transition.push_back(captured[h].data());
      decay.push_back(decays[h].data());
      stored.emplace_back(bytes);
      dense.emplace_back(bytes);
      target.push_back(stored.back().data());
      for (int64_t i = 0; i < int64_t{kDim} * kDim; ++i) {
        kernels::WriteElement(kStored, dense.back().data(), i, captured[h][i]);
      }
    }
    adapted.resize(kHeads);
    kernels::AdaptTransitions({.shape = shape,
                               .transition = transition.data(),
                               .decay = decay.data(),
                               .tokens = point.tokens,
                               .dtype = kStored,
                               .search = point.family == Family::kKda},
                              &workers, adapted, target.data());
    for (int32_t h = 0; h < kHeads; ++h) {
      dense_heads.push_back({.transition = dense[h].data(), .state = states[h].data()});
      adapted_heads.push_back({.form = adapted[h].form,
                               .rank = adapted[h].rank,
                               .transition = stored[h].data(),
                               .state = states[h].data()});
    }
  }
  Segment(const Segment&) = delete;
  Segment(Segment&&) = default;

  kernels::TupleView View(bool is_adapted) const {
    return {.heads = (is_adapted ? adapted_heads : dense_heads).data(), .transition_dtype = kStored};
  }

  // At least ‖T − T̃‖₂ of every head, including dense ones. Publishing reports a Frobenius norm of their rounding,
  // several times as large.
  double Error() const {
    double largest = 0;
    for (int32_t h = 0; h < kHeads; ++h) {
      if (adapted[h].form != TransitionForm::kDense) {
        largest = std::max(largest, adapted[h].error);
        continue;
      }
      std::vector<double> rounding;
      for (int64_t i = 0; i < int64_t{kDim} * kDim; ++i) {
        rounding.push_back(double{captured[h][i]} - kernels::ReadElement(kStored, stored[h].data(), i));
      }
      largest = std::max(largest, kernels::SpectralNormBound(rounding, kDim));
    }
    return largest;
  }

  kernels::LinearShape shape;
  std::vector<std::vector<float>> captured, states, decays;
  std::vector<std::vector<std::byte>> stored, dense;
  std::vector<kernels::AdaptedHead> adapted;
  std::vector<kernels::HeadTuple> dense_heads, adapted_heads;

 private:
  void Capture(const Point& point, Gates& gates, std::mt19937_64& random, const kernels::Kernels& host,
               kernels::Queue& queue) {
    shape = ShapeOf(point.family);
    const int32_t width = kernels::GateWidth(shape);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> unit;
    std::vector<float> shared(kHeads * kDim), k, v, beta;
    for (float& value : shared) value = 2 * normal(random);
    for (int64_t i = 0; i < point.tokens * kHeads; ++i) {
      double square = 0;
      for (int32_t c = 0; c < kDim; ++c) {
        k.push_back(normal(random) + (point.correlated ? shared[i % kHeads * kDim + c] : 0));
        v.push_back(normal(random));
        square += double{k.back()} * k.back();
      }
      for (int32_t c = 1; c <= kDim; ++c) k[k.size() - c] /= static_cast<float>(std::sqrt(square));
      beta.push_back(unit(random));
    }
    const std::vector<float> g = width == 0 ? std::vector<float>() : gates.Draw(point.tokens);
    std::vector<double> sums(kHeads * std::max(width, 1));
    for (size_t i = 0; i < g.size(); ++i) sums[i % sums.size()] += g[i];
    std::vector<void*> transition, state;
    for (int32_t h = 0; h < kHeads; ++h) {
      captured.emplace_back(kDim * kDim);
      states.emplace_back(kDim * kDim);
      decays.emplace_back();
      for (int32_t i = 0; i < kDim; ++i) {
        decays.back().push_back(static_cast<float>(std::exp(width <= 1 ? sums[h] : sums[h * width + i])));
      }
    }
    for (int32_t h = 0; h < kHeads; ++h) {
      transition.push_back(captured[h].data());
      state.push_back(states[h].data());
    }
    constexpr int64_t kRow = int64_t{kHeads} * kDim;
    host.Capture({.shape = shape,
                  .inputs = {.tokens = point.tokens,
                             .k = k.data(),
                             .v = v.data(),
                             .g = g.empty() ? nullptr : g.data(),
                             .beta = beta.data(),
                             .k_stride = kRow,
                             .v_stride = kRow,
                             .g_stride = int64_t{kHeads} * width,
                             .beta_stride = kHeads},
                  .tuple = {.transition = transition.data(), .state = state.data()}},
                 queue)
        .Wait();
  }
};

// A running state, composed through the chain.
struct Composed {
  Composed(const std::vector<Segment>& chain, bool adapted, const Options& options, const kernels::Kernels& host,
           kernels::Queue& queue) {
    std::vector<kernels::TupleView> views;
    for (const Segment& segment : chain) views.push_back(segment.View(adapted));
    std::vector<double> times;
    for (int i = 0; i < options.repetitions; ++i) {
      states = chain.back().states;  // the state after a long past, drawn like an end state
      std::vector<void*> pointers;
      for (auto& head : states) pointers.push_back(head.data());
      times.push_back(Seconds([&] {
        host.Compose({.shape = chain[0].shape, .interiors = views, .state = {.heads = pointers.data()}}, queue).Wait();
      }));
    }
    seconds = Median(times);
  }

  std::vector<std::vector<float>> states;
  double seconds;
};

double LargestRelativeError(const Composed& a, const Composed& b) {
  double largest = 0;
  for (int32_t h = 0; h < kHeads; ++h) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.states[h].size(); ++i) {
      error += std::pow(double{a.states[h][i]} - b.states[h][i], 2);
      norm += std::pow(double{b.states[h][i]}, 2);
    }
    largest = std::max(largest, std::sqrt(error / norm));
  }
  return largest;
}

nlohmann::json Measure(const Point& point, const Options& options, const kernels::Kernels& host, kernels::Queue& queue,
                       kernels::Workers& workers) {
  std::mt19937_64 random(7);
  Gates gates(point, random);
  std::vector<Segment> chain;
  for (int i = 0; i < kChain; ++i) chain.emplace_back(point, gates, random, host, queue, workers);
  int64_t bytes = 0, dense_bytes = 0;
  int zero = 0, low_rank = 0, dense = 0;
  std::vector<double> ranks;
  double error = 0;
  for (const Segment& segment : chain) {
    for (const kernels::AdaptedHead& head : segment.adapted) {
      bytes += kernels::TransitionBytes(segment.shape, head.form, head.rank, kStored);
      dense_bytes += kernels::TransitionBytes(segment.shape, TransitionForm::kDense, 0, kStored);
      zero += head.form == TransitionForm::kZero;
      dense += head.form == TransitionForm::kDense;
      if (head.form == TransitionForm::kLowRank) ++low_rank, ranks.push_back(head.rank);
    }
    error = std::max(error, segment.Error());
  }
  const Composed exact(chain, false, options, host, queue), adapted(chain, true, options, host, queue);
  const double heads = kHeads * kChain;
  return {{"family", kernels::testing::Name(point.family)},
          {"keys", point.correlated ? "correlated" : "isotropic"},
          {"decay", point.rate == 0 ? nlohmann::json("initial") : nlohmann::json(point.rate)},
          {"tokens", point.tokens},
          {"zero", zero / heads},
          {"low_rank", low_rank / heads},
          {"dense", dense / heads},
          {"median_rank", ranks.empty() ? 0 : Median(ranks)},
          {"bytes_ratio", static_cast<double>(bytes) / static_cast<double>(dense_bytes)},
          {"seconds", adapted.seconds},
          {"dense_seconds", exact.seconds},
          {"seconds_ratio", adapted.seconds / exact.seconds},
          {"error", error},
          {"state_rel_l2", LargestRelativeError(adapted, exact)}};
}

std::vector<Point> Points(bool quick) {
  std::vector<Point> points;
  if (quick) return {{Family::kGdn, false, 0, 256}, {Family::kKda, false, 0, 256}, {Family::kDeltanet, true, 0, 64}};
  for (Family family : {Family::kGdn, Family::kKda}) {
    for (bool correlated : {false, true}) {
      for (int64_t tokens : kLengths) points.push_back({family, correlated, 0, tokens});
    }
    for (double rate : {1e-4, 1e-3, 1e-2, 1e-1}) {
      for (int64_t tokens : kLengths) points.push_back({family, false, rate, tokens});
    }
  }
  for (bool correlated : {false, true}) {
    for (int64_t tokens : kLengths) points.push_back({Family::kDeltanet, correlated, 0, tokens});
  }
  return points;
}

}  // namespace

absl::Status Transitions(const Options& options, nlohmann::json& figures) {
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  kernels::ThreadPool workers(threads);
  const kernels::Kernels& host = kernels::Host();
  const auto queue = host.MakeQueue(&workers);
  figures = {{"machine", Machine()}, {"epsilon", kernels::kDefaultEpsilon},
             {"stored", "fp16"},     {"heads", kHeads},
             {"d_k", kDim},          {"d_v", kDim},
             {"segments", kChain},   {"cases", nlohmann::json::array()}};
  std::printf("%-9s %-10s %-8s %6s  %5s %8s %5s %5s  %6s %6s  %8s %8s\n", "family", "keys", "decay", "tokens", "zero",
              "low rank", "dense", "rank", "bytes", "time", "error", "state");
  for (const Point& point : Points(options.quick)) {
    const nlohmann::json figure = Measure(point, options, host, *queue, workers);
    const std::string decay = point.rate == 0 ? "initial" : absl::StrCat(point.rate);
    std::printf("%-9s %-10s %-8s %6ld  %5.2f %8.2f %5.2f %5.0f  %6.2f %6.2f  %8.1e %8.1e\n",
                kernels::testing::Name(point.family).c_str(), point.correlated ? "correlated" : "isotropic",
                decay.c_str(), point.tokens, figure["zero"].get<double>(), figure["low_rank"].get<double>(),
                figure["dense"].get<double>(), figure["median_rank"].get<double>(), figure["bytes_ratio"].get<double>(),
                figure["seconds_ratio"].get<double>(), figure["error"].get<double>(),
                figure["state_rel_l2"].get<double>());
    std::fflush(stdout);
    figures["cases"].push_back(figure);
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
