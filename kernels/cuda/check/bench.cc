// SPDX-License-Identifier: Apache-2.0
// Times the cuda back end against the copy bandwidth of the same GPU, measured between the repetitions. Prints JSON.
//
// usage: cuda_bench
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {
namespace {

constexpr int kRepetitions = 21, kCallsARepetition = 8;

// Device memory filled with random numbers of a type, because zeros multiply faster than real data.
class Numbers {
 public:
  Numbers(DeviceMemory& memory, DType dtype, int64_t count, double scale) : memory_(memory) {
    // A few thousand random numbers repeated: only their variation matters.
    constexpr int64_t kPeriod = 8191;
    static std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    const size_t bytes = static_cast<size_t>(count) * ElementBytes(dtype);
    std::vector<std::byte> host(bytes);
    for (int64_t i = 0; i < count && i < kPeriod; ++i) {
      WriteElement(dtype, host.data(), i, static_cast<float>(scale) * normal(engine));
    }
    const size_t period = kPeriod * ElementBytes(dtype);
    for (size_t at = period; at < bytes; at += period) {
      std::copy_n(host.begin(), std::min(period, bytes - at), host.begin() + static_cast<int64_t>(at));
    }
    data_ = memory.Allocate(bytes);
    memory.CopyToDevice(data_, host.data(), bytes);
  }
  ~Numbers() { memory_.Free(data_); }
  Numbers(const Numbers&) = delete;

  void* at(size_t byte) const { return static_cast<std::byte*>(data_) + byte; }

 private:
  DeviceMemory& memory_;
  void* data_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size()) / 2, values.end());
  return values[values.size() / 2];
}

double Seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes read and written per second by a copy of 1 GiB.
class CopyLimit {
 public:
  explicit CopyLimit(DeviceMemory& memory)
      : source_(memory, DType::kF32, kBytes / 4, 1), target_(memory, DType::kF32, kBytes / 4, 1) {}
  double Measure() const {
    const double seconds = Seconds([&] {
      Check(cudaMemcpyAsync(target_.at(0), source_.at(0), kBytes, cudaMemcpyDeviceToDevice, nullptr), "copy");
      Check(cudaStreamSynchronize(nullptr), "copy");
    });
    return 2.0 * kBytes / seconds;
  }

 private:
  static constexpr int64_t kBytes = int64_t{1} << 30;
  const Numbers source_, target_;
};

// One row of the table. `submit` submits one call and returns its event; `bytes` are what it must read and write.
void Report(const std::string& op, const std::string& family, const std::string& dtype, const std::string& shape,
            double bytes, double flops, const CopyLimit& copy, const std::function<Event()>& submit) {
  submit().Wait();  // modules are loaded, workspaces allocated
  std::vector<double> seconds, rates;
  for (int i = 0; i < kRepetitions; ++i) {
    seconds.push_back(Seconds([&] {
                        Event last;
                        for (int c = 0; c < kCallsARepetition; ++c) last = submit();
                        last.Wait();
                      }) /
                      kCallsARepetition);
    rates.push_back(copy.Measure());
  }
  static bool first = true;
  const double limit = bytes / Median(rates), median = Median(seconds);
  std::printf(
      "%s\n  {\"op\": \"%s\", \"family\": \"%s\", \"dtype\": \"%s\", \"backend\": \"cuda\", \"shape\": \"%s\", "
      "\"bytes\": %.0f, \"flops\": %.0f, \"seconds\": %.9f, \"limit_seconds\": %.9f, \"ratio\": %.4f, "
      "\"copy_bytes_per_s\": %.4e}",
      first ? "" : ",", op.c_str(), family.c_str(), dtype.c_str(), shape.c_str(), bytes, flops, median, limit,
      limit / median, Median(rates));
  first = false;
}

const char* Name(DType dtype) {
  return dtype == DType::kF32 ? "fp32" : dtype == DType::kF16 ? "fp16" : "bf16";
}

// 16 interiors onto the state of Qwen3-Next's 36 layers at once: 1,152 heads of 128 × 128.
void TimeCompose(const Kernels& kernels, Queue& queue, DType dtype, const CopyLimit& copy) {
  constexpr int32_t kHeads = 1152, kDim = 128, kInteriors = 16;
  constexpr int64_t kMatrix = kDim * kDim;
  const size_t matrix_bytes = kMatrix * ElementBytes(dtype);
  DeviceMemory& memory = *kernels.memory();
  // Small numbers, so that chains of products neither vanish nor grow.
  const Numbers tuples(memory, dtype, 2 * kInteriors * kHeads * kMatrix, 0.05);
  const Numbers states(memory, DType::kF32, kHeads * kMatrix, 1);
  std::vector<HeadTuple> heads(size_t{kInteriors} * kHeads);
  for (size_t i = 0; i < heads.size(); ++i) {
    heads[i].transition = tuples.at(2 * i * matrix_bytes);
    heads[i].state = tuples.at((2 * i + 1) * matrix_bytes);
  }
  std::vector<TupleView> interiors;
  for (int c = 0; c < kInteriors; ++c) {
    interiors.push_back({.heads = heads.data() + c * kHeads, .transition_dtype = dtype, .state_dtype = dtype});
  }
  std::vector<void*> state(kHeads);
  for (int h = 0; h < kHeads; ++h) state[h] = states.at(static_cast<size_t>(h) * kMatrix * sizeof(float));
  for (const StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
    const ComposeArgs args = {
        .shape =
            {.family = Family::kGdn, .heads = kHeads, .key_heads = kHeads, .d_k = kDim, .d_v = kDim, .order = order},
        .interiors = interiors,
        .state = {.heads = state.data()}};
    const std::string shape = std::string("n 16, 1152 heads, 128 x 128, fp32 state, ") +
                              (order == StateOrder::kKeyFirst ? "k-first" : "v-first");
    Report("Compose", "gdn", Name(dtype), shape, 2.0 * kInteriors * kHeads * matrix_bytes + 8.0 * kHeads * kMatrix,
           2.0 * kInteriors * kHeads * kMatrix * kDim, copy, [&] { return kernels.Compose(args, queue); });
  }
}

// 12 layers × 2 heads × 256 of 1,024 tokens in one call, rotated, hashed or not, into pages of 16 tokens.
void TimeLand(const Kernels& kernels, Queue& queue, bool hashed, const CopyLimit& copy) {
  constexpr int32_t kHeads = 24, kDim = 256, kPageTokens = 16;
  constexpr int64_t kTokens = 16 * 1024, kUnitTokens = 4, kUnits = kTokens / kUnitTokens;
  constexpr DType kType = DType::kBF16;
  constexpr int64_t kRow = int64_t{kHeads} * kDim;
  DeviceMemory& memory = *kernels.memory();
  const Numbers rows(memory, kType, kTokens * kRow, 1), pages(memory, kType, kTokens * kRow, 1);
  const Numbers checksums(memory, DType::kF32, 2 * kUnits, 1);
  std::vector<const void*> units;
  for (int64_t u = 0; u < kUnits; ++u) units.push_back(rows.at(static_cast<size_t>(u * kUnitTokens * kRow) * 2));
  std::vector<int32_t> table(kTokens / kPageTokens);
  for (size_t p = 0; p < table.size(); ++p) table[p] = static_cast<int32_t>(p * 37 % table.size());
  std::vector<double> frequencies;
  for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(1e7, -i / 32.0));
  const LandArgs args = {.source = {.units = units.data(),
                                    .unit_tokens = kUnitTokens,
                                    .tokens = kTokens,
                                    .heads = kHeads,
                                    .dim = kDim,
                                    .dtype = kType},
                         .rotation = {RopeStyle::kHalfSplit, 64, frequencies.data()},
                         .delta = 4096,
                         .target = {.base = pages.at(0),
                                    .page_stride = kPageTokens * kRow,
                                    .token_stride = kRow,
                                    .head_stride = kDim,
                                    .page_tokens = kPageTokens,
                                    .page_table = table.data(),
                                    .dtype = kType},
                         .unit_checksums = hashed ? static_cast<uint64_t*>(checksums.at(0)) : nullptr};
  Report("Land", "", Name(kType), hashed ? "16384 tokens, 24 heads x 256, hashed" : "16384 tokens, 24 heads x 256",
         2.0 * kTokens * kRow * 2, 0, copy, [&] { return kernels.Land(args, queue); });
}

}  // namespace

int Main() {
  const Kernels* kernels = CudaOrNull();
  if (kernels == nullptr) {
    std::fprintf(stderr, "cuda_bench: no GPU that this build has kernels for\n");
    return 2;
  }
  const std::unique_ptr<Queue> queue = kernels->MakeQueue(nullptr);
  const CopyLimit copy(*kernels->memory());
  std::printf("[");
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) TimeCompose(*kernels, *queue, dtype, copy);
  TimeLand(*kernels, *queue, false, copy);
  TimeLand(*kernels, *queue, true, copy);
  std::printf("\n]\n");
  return 0;
}

}  // namespace ashlar::kernels::cuda

int main() {
  return ashlar::kernels::cuda::Main();
}
