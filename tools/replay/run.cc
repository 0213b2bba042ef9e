// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <thread>

#include "tools/replay/commands.h"
#include "tools/replay/replay.h"
#include "tools/replay/units.h"

namespace ashlar::replay {
namespace {

nlohmann::json JsonOf(const Trace& trace, const Run& run) {
  nlohmann::json grid = nlohmann::json::array();
  for (const auto& trial : run.tuning.grid) {
    grid.push_back(
        {{"alpha", trial.alpha}, {"token_hit_rate", trial.token_hit_rate}, {"flops_saved", trial.flops_saved}});
  }
  return {{"trace", run.trace},
          {"policy", run.policy},
          {"capture", run.capture},
          {"capacity_bytes", run.capacity_bytes},
          {"optimum", run.optimum},
          {"boundaries", false},  // as in older files: no policy is told where segments of prompts end
          {"requests", run.requests},
          {"trace_seconds", trace.span_seconds()},
          {"tokens", run.tokens},
          {"token_hit_rate", run.token_hit_rate()},
          {"request_hit_rate", run.request_hit_rate()},
          {"flops_saved", run.flops_saved},
          {"flops_all", run.flops_all},
          {"peak_bytes", run.usage.peak_bytes},
          {"states", run.usage.states},
          {"evictions", run.usage.evictions},
          {"refusals", run.usage.refusals},
          {"alpha", run.tuning.alpha},
          {"alpha_grid", std::move(grid)},
          {"misses", {{"never_seen", run.tokens_never_seen}, {"lost", run.tokens_lost}}},
          {"ttft_ms", {{"p50", run.Quantile(0.5)}, {"p95", run.Quantile(0.95)}, {"p99", run.Quantile(0.99)}}},
          {"seconds", run.seconds}};
}

void Print(const Run& run) {
  std::printf("%-24s %8.2f  %-15s │ %8.4f %8.4f │ %10.4g │ %8.3f %7llu %9llu │ %8.1f %8.1f", run.trace.c_str(),
              static_cast<double>(run.capacity_bytes) / 1e9, run.policy.c_str(), run.token_hit_rate(),
              run.request_hit_rate(), run.flops_saved, static_cast<double>(run.usage.peak_bytes) / 1e9,
              static_cast<unsigned long long>(run.usage.states), static_cast<unsigned long long>(run.usage.evictions),
              run.Quantile(0.5), run.Quantile(0.95));
  if (!run.tuning.grid.empty()) std::printf("  α = %.1f", run.tuning.alpha);
  std::printf("\n");
}

void AddPanel(const std::string& trace, const std::vector<Run>& runs, Curves& curves) {
  Curves::Panel panel{.title = trace};
  for (const Run& run : runs) {
    auto curve = std::find_if(panel.curves.begin(), panel.curves.end(),
                              [&](const Curves::Curve& other) { return other.name == run.policy; });
    if (curve == panel.curves.end()) curve = panel.curves.insert(curve, {.name = run.policy});
    curve->points.push_back({static_cast<double>(run.capacity_bytes) / 1e9, run.token_hit_rate()});
  }
  curves.panels.push_back(std::move(panel));
}

}  // namespace

absl::Status RunTraces(const Options& options, Figures& figures) {
  absl::StatusOr<Model> model = FindModel(options.model);
  if (!model.ok()) return model.status();
  model->costs = InPages(model->costs, options.page);
  std::vector<RunSpec> specs;
  for (const uint64_t capacity : options.capacities) {
    for (const std::string& policy : options.policies) {
      for (const std::string& variant : Variants(policy)) {
        const auto made = MakePolicy(variant, model->costs, capacity, options.capture);
        if (!made.ok()) return made.status();
      }
      specs.push_back({policy, capacity, options.capture});
    }
  }
  const auto cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  figures.json["model"] = model->name;
  figures.json["page"] = model->costs.page_tokens;
  figures.json["runs"] = nlohmann::json::array();
  figures.curves = {.title = "token hit rate by capacity, " + model->name,
                    .x = "capacity, GB",
                    .y = "token hit rate",
                    .logarithmic = true};
  std::printf("%-24s %8s  %-15s │ %8s %8s │ %10s │ %8s %7s %9s │ %8s %8s\n", "trace", "GB", "policy", "tokens",
              "requests", "FLOPs", "peak GB", "states", "evictions", "TTFT p50", "p95, ms");
  for (const std::string& path : options.traces) {
    const absl::StatusOr<Trace> trace = ReadTrace(options.format, path);
    if (!trace.ok()) return trace.status();
    absl::StatusOr<std::vector<Run>> runs;
    {
      ProgressLine progress(trace->name());
      runs = Replay(*trace, *model, specs, options.threads > 0 ? options.threads : cores,
                    [&](uint64_t done, uint64_t all) { progress.Show(done, all); });
    }
    if (!runs.ok()) return runs.status();
    for (const Run& run : *runs) {
      Print(run);
      figures.json["runs"].push_back(JsonOf(*trace, run));
    }
    const Run* before = nullptr;
    for (const Run& run : *runs) {
      if (before != nullptr && before->capacity_bytes == run.capacity_bytes) continue;
      std::printf("%-24s %8.2f  %-15s │ %8.4f\n", run.trace.c_str(), static_cast<double>(run.capacity_bytes) / 1e9,
                  "≤ optimum", run.optimum);
      before = &run;
    }
    const Run& any = runs->front();
    std::printf("%-24s %8s  %-15s │ %8.4f\n", any.trace.c_str(), "∞", "ideal",
                1 - static_cast<double>(any.tokens_never_seen) / static_cast<double>(any.tokens));
    AddPanel(trace->name(), *runs, figures.curves);
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
