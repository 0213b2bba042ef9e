// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench kernels`: every case of the table against what memory and multiply-add units can do in the same minute.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/host/thread_pool.h"
#include "tools/bench/bench.h"
#include "tools/bench/kernel_cases.h"

namespace ashlar::bench {
namespace {

constexpr size_t kCopyBytes = 48ull << 20;  // eight sets of it leave any cache

// The machine's limits, measured between the repetitions of a case and over spans as long as these, from 10 ms to half
// a second: a noisy neighbour slows both, and the loss of a core for some milliseconds affects both.
class Limits {
 public:
  explicit Limits(kernels::Workers& workers)
      : workers_(workers), copy_(kCopyBytes), copies_(static_cast<size_t>(workers.Size())) {}

  void StartCase() {
    for (std::vector<double>& rates : copies_) rates.clear();
    flops_.clear();
  }
  void Measure(double span) {
    span = std::clamp(span, kShortestSpan, kLongestSpan);
    for (int threads = 1; threads <= workers_.Size(); ++threads) {
      copies_[static_cast<size_t>(threads - 1)].push_back(copy_.Measure(threads, span, workers_));
    }
    flops_.push_back(MeasureFmaPeak(span, workers_));
  }
  // Bytes read and written per second by the best number of threads.
  double bandwidth() const {
    double best = 0;
    for (const std::vector<double>& rates : copies_) best = std::max(best, 2 * Median(rates));
    return best;
  }
  double flops() const { return Median(flops_); }

 private:
  static constexpr double kShortestSpan = 0.01, kLongestSpan = 0.5;  // seconds

  kernels::Workers& workers_;
  MemcpyLimit copy_;
  std::vector<std::vector<double>> copies_;  // [threads − 1][repetition], bytes copied per second
  std::vector<double> flops_;
};

nlohmann::json Time(const KernelCase& kernel_case, const kernels::Kernels& back_end, kernels::Queue& queue,
                    int repetitions, Limits& limits) {
  const std::function<void()> run = kernel_case.prepare(back_end, queue);
  run();  // touches memory
  limits.StartCase();
  std::vector<double> seconds;
  for (int i = 0; i < repetitions; ++i) {
    seconds.push_back(Seconds(run));
    limits.Measure(seconds.back());
  }
  const double limit = std::max(kernel_case.bytes / limits.bandwidth(), kernel_case.flops / limits.flops());
  const double median = Median(seconds);
  std::printf("%-20s %-10s %-5s %-10s %-44s %10.3f %10.3f %7.2f\n", kernel_case.op.c_str(), kernel_case.family.c_str(),
              kernel_case.dtype.c_str(), std::string(back_end.name()).c_str(), kernel_case.shape.c_str(), median * 1e3,
              limit * 1e3, limit / median);
  std::fflush(stdout);
  return {{"op", kernel_case.op},
          {"family", kernel_case.family},
          {"dtype", kernel_case.dtype},
          {"backend", back_end.name()},
          {"shape", kernel_case.shape},
          {"bytes", kernel_case.bytes},
          {"flops", kernel_case.flops},
          {"seconds", median},
          {"limit_seconds", limit},
          {"ratio", limit / median},
          {"copy_bytes_per_s", limits.bandwidth()},
          {"fma_flops_per_s", limits.flops()}};
}

}  // namespace

absl::Status TimeKernels(const Options& options, nlohmann::json& figures) {
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  kernels::ThreadPool pool(threads);
  Limits limits(pool);
  // The reference defines correctness; its speed does not matter.
  const kernels::Kernels& back_end = kernels::Host();
  const std::unique_ptr<kernels::Queue> queue = back_end.MakeQueue(&pool);
  figures["machine"] = Machine();
  nlohmann::json& cases = figures["cases"] = nlohmann::json::array();
  std::printf("%-20s %-10s %-5s %-10s %-44s %10s %10s %7s\n", "op", "family", "dtype", "backend", "shape", "ms",
              "limit ms", "ratio");
  for (const auto table : {LinearCases, RowsCases, AttentionCases, DecodingCases}) {
    for (const KernelCase& kernel_case : table(options.quick)) {
      const std::string name =
          kernel_case.op + " " + kernel_case.family + " " + kernel_case.dtype + " " + kernel_case.shape;
      if (name.find(options.filter) == std::string::npos) continue;
      cases.push_back(Time(kernel_case, back_end, *queue, options.repetitions, limits));
    }
  }
  if (cases.empty())
    return absl::NotFoundError(absl::StrCat("--filter: no case's name contains '", options.filter, "'"));
  return absl::OkStatus();
}

}  // namespace ashlar::bench
