// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <iterator>
#include <span>
#include <vector>

#include "storage/prefix/checkpoint_plan.h"
#include "storage/prefix/overlap_model.h"
#include "storage/prefix/prefix_tree.h"
#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/spacing.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {
namespace {

constexpr uint64_t kChunk = 64;  // tokens: checkpoints are at multiples of it, as chunked kernels capture them
constexpr size_t kMostCheckpoints = 32;

// The tokens that a request shares with the latest earlier request that shares the most.
struct Overlap {
  uint64_t prompt = 0, depth = 0, entry = 0, entry_prompt = 0;
};

struct Latest {
  uint64_t request = 0, prompt = 0;
};

std::vector<Overlap> Overlaps(const Trace& trace) {
  storage::PrefixTree<Latest> tree;
  std::vector<Overlap> overlaps;
  std::vector<int32_t> tokens;
  for (const Trace::Request& request : trace.requests()) {
    const uint64_t prompt = trace.Tokens(request, tokens);
    const auto reached = tree.Walk(std::span(tokens).first(prompt));
    const Latest& latest = (reached.inside != nullptr ? reached.inside : reached.node)->data;
    overlaps.push_back({prompt, reached.depth, latest.request, latest.prompt});
    const auto inserted = tree.Insert(tokens);
    const Latest now{overlaps.size() - 1, prompt};
    for (auto* node = inserted.node; node != nullptr; node = node->parent()) node->data = now;
  }
  return overlaps;
}

class Placement {
 public:
  virtual ~Placement() = default;
  virtual std::vector<uint64_t> Place(uint64_t prompt, size_t checkpoints) const = 0;
};

class Heuristic final : public Placement {
 public:
  explicit Heuristic(Spacing spacing) : spacing_(spacing) {}
  std::vector<uint64_t> Place(uint64_t prompt, size_t checkpoints) const override {
    return Space(spacing_, prompt + 1, kChunk, checkpoints);
  }

 private:
  const Spacing spacing_;
};

class Learned final : public Placement {
 public:
  explicit Learned(std::span<const Overlap> seen) {
    storage::OverlapModel model;
    for (const Overlap& overlap : seen) {
      if (overlap.depth > 0) model.Observe(overlap.depth, overlap.entry_prompt);
    }
    forecast_ = model.Forecast();
  }
  std::vector<uint64_t> Place(uint64_t prompt, size_t checkpoints) const override {
    const auto tokens = [](uint64_t depth) { return static_cast<double>(depth); };
    const storage::CheckpointPlan plan(forecast_.Within(prompt), prompt, kChunk, checkpoints, tokens);
    return plan.For({.tokens = prompt}, kChunk, tokens).Positions(checkpoints);
  }

 private:
  storage::OverlapForecast forecast_;
};

// Of the scored requests' tokens: those before the deepest checkpoint of each entry that lies within the shared tokens.
double Skipped(std::span<const Overlap> overlaps, size_t first_scored, const Placement& placement, size_t checkpoints) {
  double skipped = 0, tokens = 0;
  for (size_t i = first_scored; i < overlaps.size(); ++i) {
    tokens += static_cast<double>(overlaps[i].prompt);
    if (overlaps[i].depth == 0) continue;
    uint64_t deepest = 0;
    for (const uint64_t at : placement.Place(overlaps[i].entry_prompt, checkpoints)) {
      if (at <= overlaps[i].depth) deepest = at;
    }
    skipped += static_cast<double>(deepest);
  }
  return skipped / tokens;
}

}  // namespace

absl::Status ComparePlacements(const Options& options, Figures& figures) {
  figures.curves = {.title = "tokens skipped by checkpoints per entry, learned on the first half, scored on the second",
                    .x = "checkpoints",
                    .y = "share of input tokens",
                    .logarithmic = true};
  figures.json["placements"] = nlohmann::json::array();
  for (const std::string& path : options.traces) {
    const absl::StatusOr<Trace> trace = ReadTrace(options.format, path);
    if (!trace.ok()) return trace.status();
    const std::vector<Overlap> overlaps = Overlaps(*trace);
    const size_t half = overlaps.size() / 2;
    const Learned learned(std::span<const Overlap>(overlaps).first(half));
    const Heuristic balanced(Spacing::kBalanced), block(Spacing::kBlock), root(Spacing::kRoot),
        logarithmic(Spacing::kLogarithmic);
    const std::pair<const char*, const Placement*> placements[] = {{"learned", &learned},
                                                                   {"balanced", &balanced},
                                                                   {"block", &block},
                                                                   {"sqrt", &root},
                                                                   {"logarithmic", &logarithmic}};
    Curves::Panel panel{.title = trace->name()};
    std::printf("%-24s %11s │", "trace", "checkpoints");
    for (const auto& [name, placement] : placements) {
      std::printf(" %11s", name);
      panel.curves.push_back({.name = name});
    }
    std::printf("\n");
    ProgressLine progress(trace->name());
    for (size_t m = 1; m <= kMostCheckpoints; ++m) {
      std::string line;
      for (size_t i = 0; i < std::size(placements); ++i) {
        const double skipped = Skipped(overlaps, half, *placements[i].second, m);
        figures.json["placements"].push_back(
            {{"trace", trace->name()}, {"placement", placements[i].first}, {"checkpoints", m}, {"skipped", skipped}});
        panel.curves[i].points.push_back({static_cast<double>(m), skipped});
        char figure[32];
        std::snprintf(figure, sizeof figure, " %11.4f", skipped);
        line += figure;
      }
      std::printf("%-24s %11zu │%s\n", trace->name().c_str(), m, line.c_str());
      progress.Show(m, kMostCheckpoints);
    }
    figures.curves.panels.push_back(std::move(panel));
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
