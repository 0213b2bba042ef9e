// SPDX-License-Identifier: Apache-2.0
// refengine-profile: what the demo's model costs on this machine. Prints a full prefill's time by part, its share of
// the FMA peak measured in the same run, and the same prompt set from cached segments.
//
// usage: refengine-profile [FILE] [SECTIONS] [SECTION_TOKENS] [SEAM]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "examples/refengine/flops.h"
#include "examples/refengine/stored_segment.h"
#include "examples/refengine/tokenizer.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::refengine {
namespace {

constexpr int32_t kPageTokens = 64;
constexpr int64_t kQueryTokens = 64;

struct Timed {
  double seconds = 0;
  Profile profile;
  std::vector<float> logits = std::vector<float>(kVocabulary);
};

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

Timed Run(Engine& engine, Sequence& sequence, std::span<const Step> chain) {
  Timed timed;
  AdvanceOptions options;
  options.last_logits = timed.logits.data();
  options.profile = &timed.profile;
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = engine.Advance(sequence, chain, options);
  timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Check(status);
  return timed;
}

void Print(const char* what, const Timed& timed, const Flops& flops, double peak) {
  std::printf(
      "%s: %.3f s, %.1f GFLOP (matrices %.1f, attention %.1f, recurrence %.1f, composition %.1f), %.2f of peak\n", what,
      timed.seconds, flops.total() / 1e9, flops.matrices / 1e9, flops.attention / 1e9, flops.recurrence / 1e9,
      flops.composition / 1e9, flops.total() / timed.seconds / peak);
  for (int part = 0; part < kParts; ++part) {
    std::printf("  %-12s %8.1f ms\n", Name(static_cast<Part>(part)), 1e3 * timed.profile.seconds[part]);
  }
}

double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += double{a[i] - b[i]} * (a[i] - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<int32_t> ReadText(const char* path, int64_t tokens) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (static_cast<int64_t>(text.size()) < tokens) {
    std::fprintf(stderr, "%s: %zu bytes, %ld are needed\n", path, text.size(), static_cast<long>(tokens));
    std::exit(1);
  }
  return Tokenize(text.substr(0, tokens));
}

// The demo's model on this machine, and a text cut into equal sections followed by a query.
class Measurement {
 public:
  Measurement(std::vector<int32_t> text, int64_t sections, int64_t section_tokens)
      : text_(std::move(text)),
        sections_(sections),
        section_tokens_(section_tokens),
        memory_(KvPages::RequiredBytes(model_.config(), kPageTokens, Pages())),
        pool_(model_.config(), kPageTokens, Pages(), memory_),
        peak_(FmaPeak(threads_)) {
    std::printf("kernels %s, %d threads, FMA peak %.1f GFLOP/s\n", std::string(kernels_.name()).c_str(),
                threads_.Size(), peak_ / 1e9);
  }

  void FullPrefill() {
    Sequence sequence(model_.config(), pool_);
    const Step whole = Step::Compute(text_);
    const Timed timed = Run(engine_, sequence, {&whole, 1});
    Print("full prefill", timed, ChainFlops(model_.config(), 0, {&whole, 1}), peak_);
    expected_ = timed.logits;
    const int32_t next = GreedyToken(timed.logits);
    const Step one = Step::Compute({&next, 1});
    std::printf("decode: %.1f ms a token\n", 1e3 * Run(engine_, sequence, {&one, 1}).seconds);
  }

  void Store(SeamWidths seams) {
    for (int64_t i = 0; i < sections_; ++i) {
      stored_.emplace_back(model_.config(), section_tokens_, seams);
      const std::span<const int32_t> tokens(text_);
      Check(PrefillIsolated(engine_, pool_, tokens.subspan(i * section_tokens_, section_tokens_), kernels_, *queue_,
                            stored_.back()));
    }
  }

  // `replaced`: transitions to use instead of the stored ones, or null. Landing is not part of the time.
  void Seams(const char* what, const ReplacedTransitions* replaced) {
    Sequence sequence(model_.config(), pool_);
    if (!sequence.Reserve(text_.size())) Check(absl::ResourceExhaustedError("pages"));
    const std::span<const int32_t> tokens(text_);
    std::vector<LayerTables> layers;
    std::vector<Step> chain;
    int64_t done = 0;
    for (int64_t i = 0; i < sections_; ++i) {
      const StoredSegment& segment = stored_[i];
      segment.LandRows(model_, sequence, i * section_tokens_, kernels_, *queue_);
      layers.push_back(replaced == nullptr ? LayerTables(config(), segment.layers()) : (*replaced)(segment.layers()));
      layers.back().StandAt(i * section_tokens_);
      const int64_t begin = i * section_tokens_ + segment.seams().head;
      chain.push_back(Step::Compute(tokens.subspan(done, begin - done)));
      chain.push_back(Step::Cached(segment.interior(), layers.back().layers()));
      done = begin + segment.interior();
    }
    chain.push_back(Step::Compute(tokens.subspan(done)));
    const Timed timed = Run(engine_, sequence, chain);
    Print(what, timed, ChainFlops(model_.config(), 0, chain), peak_);
    std::printf("  logits differ from full recompute by %.3f; next token %s\n", RelativeError(timed.logits, expected_),
                GreedyToken(timed.logits) == GreedyToken(expected_) ? "agrees" : "differs");
  }

  const ModelConfig& config() const { return model_.config(); }

 private:
  // Pages for two sequences.
  int32_t Pages() const { return 2 * (static_cast<int32_t>(text_.size()) / kPageTokens + 2); }

  const std::vector<int32_t> text_;
  const int64_t sections_, section_tokens_;
  const Model model_{DemoConfig()};
  const kernels::Kernels& kernels_ = kernels::Host();
  kernels::ThreadPool threads_{0};
  const std::unique_ptr<kernels::Queue> queue_ = kernels_.MakeQueue(&threads_);
  Engine engine_{model_, kernels_, threads_};
  std::vector<std::byte> memory_;
  KvPages pool_;
  double peak_;
  std::vector<float> expected_;
  std::vector<StoredSegment> stored_;
};

int Main(const char* path, int64_t sections, int64_t section_tokens, int64_t seam) {
  Measurement measurement(ReadText(path, sections * section_tokens + kQueryTokens), sections, section_tokens);
  // Twice each: the first run touches memory and wakes the CPU.
  for (int repeat = 0; repeat < 2; ++repeat) measurement.FullPrefill();
  measurement.Store({seam, seam});
  for (int repeat = 0; repeat < 2; ++repeat) measurement.Seams("seams", nullptr);
  const ReplacedTransitions identity(measurement.config(), ReplacedTransitions::With::kIdentity);
  measurement.Seams("naive addition", &identity);
  return 0;
}

}  // namespace
}  // namespace ashlar::refengine

int main(int argc, char** argv) {
  const auto number = [&](int index, int64_t otherwise) { return argc > index ? std::atoll(argv[index]) : otherwise; };
  return ashlar::refengine::Main(argc > 1 ? argv[1] : "/usr/share/common-licenses/GPL-3", number(2, 16), number(3, 528),
                                 number(4, 8));
}
