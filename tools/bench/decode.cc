// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench decode`: decoding a batch from buffers against recurrent decoding, and verifying drafts against as many
// recurrent steps that keep a state each. gdn as in Qwen3-Next, states of fp32 and of bf16, buffers of fp16; the
// layers' states together exceed any cache. States of fp32 also with a copy of fp16 that tokens read which do not
// flush. Each is held to the time in which the cores can read, or read and write, just these states.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/decoding_choice.h"
#include "kernels/decoding_costs.h"
#include "kernels/host/thread_pool.h"
#include "kernels/testing/names.h"
#include "tools/bench/bench.h"
#include "tools/bench/decode_batch.h"
#include "tools/bench/decode_engine.h"
#include "tools/bench/streams.h"

namespace ashlar::bench {
namespace {

using kernels::DecodeBytes;

constexpr int32_t kMostDrafts = 8, kDraftCounts[] = {2, 4, kMostDrafts};

// Times of one step (a token through all layers), of the alternatives, and of walks over all states. Rounds alternate,
// so that a noisy neighbour slows all of them.
struct Times {
  std::vector<double> buffered, by_decode, by_advance, read, update;
  // The faster of the two opponents.
  double Recurrent() const { return std::min(Median(by_decode), Median(by_advance)); }
};

struct Layout {
  DType state;
  std::optional<DType> rounded;
  int32_t layers;
};

// The limits of one step.
struct Limits {
  double buffered = 0;   // seconds
  double recurrent = 0;  // seconds; 0: not known
  double bytes_ratio = 0;
};

class DecodeBench {
 public:
  DecodeBench(const Options& options, const Layout& layout, kernels::Workers& workers)
      : repetitions_(options.repetitions),
        workers_(workers),
        batch_({.state = layout.state,
                .rounded = layout.rounded,
                .requests = options.quick ? 4 : 32,
                .layers = options.quick ? 2 : layout.layers,
                .saved_states = kMostDrafts - 1}),
        bytes_(kernels::DecodeBytesOf(batch_.shape(), layout.state, batch_.options().buffer, layout.rounded)),
        queue_(host_.MakeQueue(&workers)) {}

  nlohmann::json Run() {
    const int32_t best = kernels::BestCapacity(bytes_);
    for (const int32_t capacity : {4, 8, 12, best}) Chunkwise(capacity);
    for (const int32_t drafts : kDraftCounts) Verify(best / 2, drafts);
    return cases_;
  }

  // The capacity chosen by measured costs, and the expected costs.
  nlohmann::json Choose() {
    const DecodeBatch::Options& batch = batch_.options();
    const kernels::DecodeCosts costs = kernels::MeasureDecoding(host_, *queue_,
                                                                {.shape = batch_.shape(),
                                                                 .state = batch.state,
                                                                 .buffer = batch.buffer,
                                                                 .rounded = batch.rounded,
                                                                 .requests = batch.requests,
                                                                 .layers = batch.layers});
    const kernels::DecodeChoice chosen = kernels::ChooseDecoding(costs, std::nullopt);
    return {{"dtype", kernels::testing::Name(batch.state)},
            {"reads", kernels::testing::Name(batch.rounded.value_or(batch.state))},
            {"state_bytes", batch_.States().size()},
            {"buffer", chosen.capacity},
            {"expected_speedup", std::min(costs.advance, costs.recurrent) / chosen.cost},
            {"advance_us", costs.advance * 1e6},
            {"recurrent_us", costs.recurrent * 1e6},
            {"read_us", costs.read * 1e6},
            {"flush_us", costs.flush * 1e6},
            {"slot_us", costs.slot * 1e6},
            {"flush_slot_us", costs.flush_slot * 1e6},
            {"stateless_us", costs.stateless * 1e6}};
  }

 private:
  template <typename Fn>
  double ForEachLayer(const Fn& fn) {
    return Seconds([&] {
      for (int32_t layer = 0; layer < batch_.options().layers; ++layer) fn(layer);
    });
  }

  void WalkStates(Times& times) {
    times.read.push_back(ReadStream(batch_.States(), workers_));
    times.update.push_back(UpdateStream(batch_.States(), workers_));
  }

  // Seconds in which `slots` of every request's buffer can be read in every layer at the rate of states.
  double SlotSeconds(double slots, double read_seconds) const {
    return read_seconds * slots * bytes_.slot / bytes_.state;
  }
  // RoundedPart: the bytes of a state's copy, as a part of the state's. ReadPart: the part that a step without a flush
  // reads. A step that flushes writes the copy, which counts as half of reading and writing it.
  double RoundedPart() const { return bytes_.rounded / bytes_.state; }
  double ReadPart() const { return bytes_.rounded > 0 ? RoundedPart() : 1; }

  // Whole rounds of `capacity` tokens; the last token of each round flushes.
  void Chunkwise(int32_t capacity) {
    Times times;
    for (int i = 0; i < repetitions_; ++i) {
      double round = 0;
      for (int32_t filled = 0; filled < capacity; ++filled) {
        round += ForEachLayer([&](int32_t l) { batch_.Decode(host_, *queue_, l, filled, filled + 1 == capacity); });
        if (filled % 4 != 0) continue;
        times.by_decode.push_back(ForEachLayer([&](int32_t l) { batch_.Decode(host_, *queue_, l, 0, true); }));
        times.by_advance.push_back(ForEachLayer([&](int32_t l) { batch_.Advance(host_, *queue_, l); }));
        WalkStates(times);
      }
      times.buffered.push_back(round / capacity);
    }
    const double read = Median(times.read), update = Median(times.update), c = capacity;
    Report("DecodeBuffered", capacity, times,
           {.buffered = (ReadPart() * read * (c - 1) + (1 + RoundedPart() / 2) * update) / c +
                        SlotSeconds((c - 1) / 2 + (c - 1) / c, read),
            .recurrent = update,
            .bytes_ratio = kernels::RecurrentBytes(bytes_) / kernels::ChunkwiseBytes(bytes_, capacity)});
  }

  // Drafts after `filled` slots. The recurrent way reads the state once, and writes every draft's state.
  void Verify(int32_t filled, int32_t drafts) {
    Times times;
    for (int i = 0; i < 2 * repetitions_; ++i) {
      times.buffered.push_back(ForEachLayer([&](int32_t l) { batch_.Verify(host_, *queue_, l, filled, drafts); }));
      times.by_decode.push_back(ForEachLayer([&](int32_t l) { batch_.DecodeSaving(host_, *queue_, l, drafts); }));
      times.by_advance.push_back(ForEachLayer([&](int32_t l) { batch_.AdvanceSaving(host_, *queue_, l, drafts); }));
      WalkStates(times);
    }
    const double read = Median(times.read);
    const double verified = ReadPart() * bytes_.state + (filled + drafts) * bytes_.slot;
    Report("VerifyDrafts " + std::to_string(drafts), filled, times,
           {.buffered = ReadPart() * read + SlotSeconds(filled + drafts, read),
            .bytes_ratio = (1 + drafts) * bytes_.state / verified});
  }

  void Report(const std::string& op, int32_t buffer, const Times& times, const Limits& limits) {
    const double step = Median(times.buffered), recurrent = times.Recurrent();
    const DecodeBatch::Options& batch = batch_.options();
    const std::string state = kernels::testing::Name(batch.state),
                      reads = kernels::testing::Name(batch.rounded.value_or(batch.state));
    const size_t mib = batch_.States().size() >> 20;
    std::printf("%-16s %-6s %-6s %6zu %6d %8.2f %6.2f %12.2f ", op.c_str(), state.c_str(), reads.c_str(), mib, buffer,
                step * 1e3, limits.buffered / step, recurrent * 1e3);
    if (limits.recurrent > 0) {
      std::printf("%6.2f %8.2f %10.2f", limits.recurrent / recurrent, recurrent / step,
                  limits.recurrent / limits.buffered);
    } else {
      std::printf("%6s %8.2f %10s", "", recurrent / step, "");
    }
    std::printf(" %9.2f\n", limits.bytes_ratio);
    std::fflush(stdout);
    const double bytes = static_cast<double>(batch_.States().size());
    cases_.push_back({{"op", op.substr(0, op.find(' '))},
                      {"family", "gdn"},
                      {"dtype", state},
                      {"reads", reads},
                      {"batch", batch_.options().requests},
                      {"layers", batch_.options().layers},
                      {"state_bytes", batch_.States().size()},
                      {"buffer", buffer},
                      {"seconds_per_step", step},
                      {"limit_seconds", limits.buffered},
                      {"ratio", limits.buffered / step},
                      {"recurrent_seconds_per_step", recurrent},
                      {"recurrent_by_decode_buffered", Median(times.by_decode)},
                      {"recurrent_by_advance_seam", Median(times.by_advance)},
                      {"read_stream_bytes_per_second", bytes / Median(times.read)},
                      {"update_stream_bytes_per_second", bytes / Median(times.update)},
                      {"speedup", recurrent / step},
                      {"bytes_ratio", limits.bytes_ratio}});
    if (limits.recurrent > 0) {
      cases_.back()["recurrent_limit_seconds"] = limits.recurrent;
      cases_.back()["recurrent_ratio"] = limits.recurrent / recurrent;
      cases_.back()["speedup_of_limits"] = limits.recurrent / limits.buffered;
    }
    if (op != "DecodeBuffered") cases_.back()["drafts"] = std::stoi(op.substr(op.find(' ')));
  }

  const int repetitions_;
  kernels::Workers& workers_;
  const kernels::Kernels& host_ = kernels::Host();
  DecodeBatch batch_;
  const DecodeBytes bytes_;
  const std::unique_ptr<kernels::Queue> queue_;
  nlohmann::json cases_ = nlohmann::json::array();
};

void PrintChoices(const nlohmann::json& choices) {
  std::printf("\n%-6s %-6s %6s %8s %8s   µs of a request in a layer: %9s %9s %7s %7s %7s %10s\n", "state", "reads",
              "MiB", "chosen", "speedup", "advance", "recurrent", "read", "flush", "slot", "flush slot");
  for (const nlohmann::json& choice : choices) {
    const auto number = [&](const char* name) { return choice.at(name).get<double>(); };
    std::printf("%-6s %-6s %6.0f %8.0f %8.2f %28s %9.1f %9.1f %7.1f %7.1f %7.2f %10.2f\n",
                choice.at("dtype").get<std::string>().c_str(), choice.at("reads").get<std::string>().c_str(),
                number("state_bytes") / (1 << 20), number("buffer"), number("expected_speedup"), "",
                number("advance_us"), number("recurrent_us"), number("read_us"), number("flush_us"), number("slot_us"),
                number("flush_slot_us"));
  }
}

}  // namespace

absl::Status Decode(const Options& options, nlohmann::json& figures) {
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  kernels::ThreadPool pool(threads);
  figures["machine"] = Machine();
  figures["cases"] = nlohmann::json::array();
  figures["threads"] = threads;
  std::printf("%-16s %-6s %-6s %6s %6s %8s %6s %12s %6s %8s %10s %9s\n", "op of gdn", "state", "reads", "MiB", "buffer",
              "ms/step", "ratio", "recurrent ms", "ratio", "speedup", "of limits", "of bytes");
  // 64 MiB of states fit in the last-level cache of large CPUs; half a gigabyte fits in none.
  constexpr Layout kLayouts[] = {{DType::kF32, std::nullopt, 8},
                                 {DType::kF32, DType::kF16, 16},
                                 {DType::kF32, std::nullopt, 1},
                                 {DType::kBF16, std::nullopt, 16}};
  const auto wanted = [&](std::string_view part) { return part.find(options.filter) != part.npos; };
  for (const Layout& layout : kLayouts) {
    if (!wanted("steps")) break;
    const nlohmann::json cases = DecodeBench(options, layout, pool).Run();
    figures["cases"].insert(figures["cases"].end(), cases.begin(), cases.end());
  }
  nlohmann::json& choices = figures["choices"] = nlohmann::json::array();
  for (const Layout& layout : kLayouts) {
    if (wanted("choices")) choices.push_back(DecodeBench(options, layout, pool).Choose());
  }
  PrintChoices(choices);
  if (wanted("engine")) DecodeByEngine(options, pool, figures["engine"] = nlohmann::json::array());
  return absl::OkStatus();
}

}  // namespace ashlar::bench
