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
#include <string>

#include "kernels/host/thread_pool.h"
#include "tools/refengine/flops.h"
#include "tools/refengine/stored_segment.h"
#include "tools/refengine/tokenizer.h"

namespace ashlar::refengine {
namespace {

constexpr int32_t kPageTokens = 64;
constexpr int64_t kQueryTokens = 64;

struct Timed {
  double seconds = 0;
  Profile profile;
  std::vector<float> logits = std::vector<float>(kVocabulary);
};

Timed Run(Engine& engine, Sequence& sequence, std::span<const Step> chain) {
  Timed timed;
  AdvanceOptions options;
  options.last_logits = timed.logits.data();
  options.profile = &timed.profile;
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = engine.Advance(sequence, chain, options);
  timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(1);
  }
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

int Main(const char* path, int64_t sections, int64_t section_tokens, int64_t seam) {
  const std::vector<int32_t> text = ReadText(path, sections * section_tokens + kQueryTokens);
  const Model model(DemoConfig());
  kernels::ThreadPool threads(0);
  const kernels::Kernels& kernels = kernels::Host();
  Engine engine(model, kernels, threads);
  const auto queue = kernels.MakeQueue(&threads);
  const int32_t pages = 2 * (text.size() / kPageTokens + 1) + section_tokens / kPageTokens + 1;
  std::vector<std::byte> memory(PagePool::RequiredBytes(model.config(), kPageTokens, pages));
  PagePool pool(model.config(), kPageTokens, pages, memory);
  const double peak = FmaPeak(threads);
  std::printf("kernels %s, %d threads, FMA peak %.1f GFLOP/s\n", std::string(kernels.name()).c_str(), threads.Size(),
              peak / 1e9);

  const Step whole = Step::Compute(text);
  std::vector<float> expected;
  for (int repeat = 0; repeat < 2; ++repeat) {
    Sequence sequence(model.config(), pool);
    const Timed timed = Run(engine, sequence, {&whole, 1});
    Print("full prefill", timed, ChainFlops(model.config(), 0, {&whole, 1}), peak);
    expected = timed.logits;
    const int32_t next = GreedyToken(timed.logits);
    const Step one = Step::Compute({&next, 1});
    std::printf("decode: %.1f ms a token\n", 1e3 * Run(engine, sequence, {&one, 1}).seconds);
  }

  const std::span<const int32_t> tokens(text);
  const SeamWidths seams{seam, seam};
  std::vector<StoredSegment> stored;
  for (int64_t i = 0; i < sections; ++i) {
    stored.emplace_back(model.config(), section_tokens, seams);
    const absl::Status status = PrefillIsolated(engine, pool, tokens.subspan(i * section_tokens, section_tokens),
                                                kernels, *queue, stored.back());
    if (!status.ok()) std::abort();
  }
  const ReplacedTransitions identity(model.config(), ReplacedTransitions::With::kIdentity);
  for (const bool naive : {false, true, false}) {
    Sequence sequence(model.config(), pool);
    if (!sequence.Reserve(text.size())) std::abort();
    std::vector<Step> chain;
    std::vector<std::vector<CachedLayer>> layers(sections);
    int64_t done = 0;
    for (int64_t i = 0; i < sections; ++i) {
      stored[i].LandRows(model, sequence, i * section_tokens, kernels, *queue);
      layers[i].assign(stored[i].layers().begin(), stored[i].layers().end());
      if (naive) layers[i] = identity(layers[i]);
      const int64_t begin = i * section_tokens + seam;
      chain.push_back(Step::Compute(tokens.subspan(done, begin - done)));
      chain.push_back(Step::Cached(stored[i].interior(), layers[i]));
      done = begin + stored[i].interior();
    }
    chain.push_back(Step::Compute(tokens.subspan(done)));
    const Timed timed = Run(engine, sequence, chain);
    Print(naive ? "seams, naive addition" : "seams", timed, ChainFlops(model.config(), 0, chain), peak);
    std::printf("  logits differ from full recompute by %.3f; next token %s\n", RelativeError(timed.logits, expected),
                GreedyToken(timed.logits) == GreedyToken(expected) ? "agrees" : "differs");
  }
  return 0;
}

}  // namespace
}  // namespace ashlar::refengine

int main(int argc, char** argv) {
  const auto number = [&](int index, int64_t otherwise) { return argc > index ? std::atoll(argv[index]) : otherwise; };
  return ashlar::refengine::Main(argc > 1 ? argv[1] : "/usr/share/common-licenses/GPL-3", number(2, 16), number(3, 528),
                                 number(4, 8));
}
