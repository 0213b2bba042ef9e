// `ashlar-bench decode`: decoding a batch from buffers against recurrent decoding, and verifying drafts against as many
// recurrent steps that keep a state each. gdn as in Qwen3-Next, states of fp32 and of bf16, buffers of fp16; the
// layers' states together exceed any cache.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "kernels/decoding_choice.h"
#include "kernels/host/thread_pool.h"
#include "tools/bench/bench.h"
#include "tools/bench/decode_batch.h"

namespace ashlar::bench {
namespace {

using kernels::DecodeBytes;

constexpr int32_t kMostDrafts = 8, kDrafts[] = {2, 4, kMostDrafts};

// Times of one step, a token through all layers, and of its opponents. Rounds take turns, so that a noisy neighbour
// slows all of them.
struct Times {
  std::vector<double> buffered, by_decode, by_advance;
  // The faster of the two opponents.
  double Recurrent() const { return std::min(Median(by_decode), Median(by_advance)); }
};

class DecodeBench {
 public:
  DecodeBench(const Options& options, kernels::DType state, kernels::Workers& workers)
      : repetitions_(options.repetitions),
        batch_({.state = state,
                .requests = options.quick ? 4 : 32,
                .layers = options.quick                   ? 2
                          : state == kernels::DType::kF32 ? 8
                                                          : 16,
                .saved_states = kMostDrafts - 1}),
        bytes_(kernels::DecodeBytesOf(batch_.shape(), batch_.options().state, batch_.options().buffer)),
        queue_(host_.MakeQueue(&workers)) {}

  nlohmann::json Run() {
    const int32_t best = kernels::BestCapacity(bytes_);
    for (const int32_t capacity : {4, 8, best, 24}) Chunkwise(capacity);
    for (const int32_t drafts : kDrafts) Verify(best / 2, drafts);
    return cases_;
  }

 private:
  template <typename Fn>
  double ForEachLayer(const Fn& fn) {
    return Seconds([&] {
      for (int32_t layer = 0; layer < batch_.options().layers; ++layer) fn(layer);
    });
  }

  // Whole rounds of `capacity` tokens of which the last flushes.
  void Chunkwise(int32_t capacity) {
    Times times;
    for (int i = 0; i < repetitions_; ++i) {
      double round = 0;
      for (int32_t filled = 0; filled < capacity; ++filled) {
        round += ForEachLayer([&](int32_t l) { batch_.Decode(host_, *queue_, l, filled, filled + 1 == capacity); });
        if (filled % 4 != 0) continue;
        times.by_decode.push_back(ForEachLayer([&](int32_t l) { batch_.Decode(host_, *queue_, l, 0, true); }));
        times.by_advance.push_back(ForEachLayer([&](int32_t l) { batch_.Advance(host_, *queue_, l); }));
      }
      times.buffered.push_back(round / capacity);
    }
    Report("DecodeBuffered", capacity, times,
           kernels::RecurrentBytes(bytes_) / kernels::ChunkwiseBytes(bytes_, capacity));
  }

  // Drafts behind `filled` slots; recurrently the state is read once, and every draft's is written.
  void Verify(int32_t filled, int32_t drafts) {
    Times times;
    for (int i = 0; i < 2 * repetitions_; ++i) {
      times.buffered.push_back(ForEachLayer([&](int32_t l) { batch_.Verify(host_, *queue_, l, filled, drafts); }));
      times.by_decode.push_back(ForEachLayer([&](int32_t l) { batch_.DecodeSaving(host_, *queue_, l, drafts); }));
      times.by_advance.push_back(ForEachLayer([&](int32_t l) { batch_.AdvanceSaving(host_, *queue_, l, drafts); }));
    }
    const double verified = bytes_.state + (filled + drafts) * bytes_.slot;
    Report("VerifyDrafts " + std::to_string(drafts), filled, times, (1 + drafts) * bytes_.state / verified);
  }

  void Report(const std::string& op, int32_t buffer, const Times& times, double bytes_ratio) {
    const double step = Median(times.buffered), speedup = times.Recurrent() / step;
    const char* state = batch_.options().state == kernels::DType::kF32 ? "fp32" : "bf16";
    std::printf("%-16s %-6s %-6s %6d %7d %12.2f %14.2f %8.2f %12.2f\n", op.c_str(), "gdn", state,
                batch_.options().requests, buffer, step * 1e3, times.Recurrent() * 1e3, speedup, bytes_ratio);
    std::fflush(stdout);
    cases_.push_back({{"op", op.substr(0, op.find(' '))},
                      {"family", "gdn"},
                      {"dtype", state},
                      {"batch", batch_.options().requests},
                      {"layers", batch_.options().layers},
                      {"buffer", buffer},
                      {"seconds_per_step", step},
                      {"recurrent_seconds_per_step", times.Recurrent()},
                      {"recurrent_by_decode_buffered", Median(times.by_decode)},
                      {"recurrent_by_advance_seam", Median(times.by_advance)},
                      {"speedup", speedup},
                      {"bytes_ratio", bytes_ratio}});
    if (op != "DecodeBuffered") cases_.back()["drafts"] = std::stoi(op.substr(op.find(' ')));
  }

  const int repetitions_;
  const kernels::Kernels& host_ = kernels::Host();
  DecodeBatch batch_;
  const DecodeBytes bytes_;
  const std::unique_ptr<kernels::Queue> queue_;
  nlohmann::json cases_ = nlohmann::json::array();
};

}  // namespace

absl::Status Decode(const Options& options, nlohmann::json& figures) {
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  kernels::ThreadPool pool(threads);
  figures["machine"] = Machine();
  figures["cases"] = nlohmann::json::array();
  std::printf("%-16s %-6s %-6s %6s %7s %12s %14s %8s %12s\n", "op", "family", "state", "batch", "buffer", "ms a step",
              "recurrent ms", "speedup", "bytes ratio");
  for (const kernels::DType state : {kernels::DType::kF32, kernels::DType::kBF16}) {
    const nlohmann::json cases = DecodeBench(options, state, pool).Run();
    figures["cases"].insert(figures["cases"].end(), cases.begin(), cases.end());
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
