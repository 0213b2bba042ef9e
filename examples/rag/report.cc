// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"

namespace ashlar::rag {
namespace {

using Value = std::function<double(const RequestResult&)>;

const char* const kWays[] = {"full", "prefix", "naive", "ashlar"};

enum class Over {
  kEvery,
  kAllHit,  // with the largest number of sections per prompt, because times of shorter prompts are not comparable
};

std::vector<double> Collect(const RunResult& run, Over over, const Value& value) {
  std::vector<double> values;
  for (const RequestResult& request : run.requests) {
    const bool full_length = request.segments == static_cast<uint64_t>(run.sections_per_prompt) + 1;
    if (over == Over::kEvery || (request.all_hit() && full_length)) values.push_back(value(request));
  }
  return values;
}

double Median(std::vector<double> values) {
  if (values.empty()) return std::nan("");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return values.empty() ? std::nan("") : sum / values.size();
}

std::optional<Layer0Error> WorstLayer0(const RunResult& run) {
  std::optional<Layer0Error> worst;
  for (const RequestResult& request : run.requests) {
    if (!request.layer0) continue;
    if (!worst) worst.emplace();
    worst->ashlar = std::max(worst->ashlar, request.layer0->ashlar);
    worst->naive = std::max(worst->naive, request.layer0->naive);
    worst->zero_transition = std::max(worst->zero_transition, request.layer0->zero_transition);
  }
  return worst;
}

double Agreement(const RunResult& run, const char* way) {
  return Mean(Collect(run, Over::kEvery, [way](const RequestResult& r) {
    return r.ways.at(way).next_token == r.ways.at("full").next_token ? 1.0 : 0.0;
  }));
}

nlohmann::json ToJson(const std::optional<Layer0Error>& error) {
  if (!error) return nullptr;
  return {{"ashlar", error->ashlar}, {"naive", error->naive}, {"zero_transition", error->zero_transition}};
}

// Segments by the tier of the hit, or by the reason of the miss.
template <typename Key>
nlohmann::json ToJson(const std::map<Key, uint64_t>& segments) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [key, count] : segments) json[std::string(Name(key))] = count;
  return json;
}

template <typename Key>
std::map<Key, uint64_t> OfAll(const RunResult& run, std::map<Key, uint64_t> RequestResult::*segments) {
  std::map<Key, uint64_t> all;
  for (const RequestResult& request : run.requests) {
    for (const auto& [key, count] : request.*segments) all[key] += count;
  }
  return all;
}

template <typename Key>
void Print(const char* what, const std::map<Key, uint64_t>& segments) {
  std::printf("\n  %s:", what);
  for (const auto& [key, count] : segments) {
    std::printf("  %s %lu", std::string(Name(key)).c_str(), static_cast<unsigned long>(count));
  }
}

nlohmann::json ToJson(const RequestResult& request) {
  nlohmann::json json = {{"question", request.question},
                         {"node", request.node},
                         {"tokens", request.tokens},
                         {"segments", request.segments},
                         {"hits", request.hits},
                         {"misses", request.misses},
                         {"landed", request.landed},
                         {"computed_tokens", request.computed_tokens},
                         {"full_flops_ratio", request.full_flops_ratio},
                         {"flop_floor_speedup", request.flop_floor_speedup},
                         {"speedup_vs_full", request.speedup()},
                         {"layer0_state_rel_l2", ToJson(request.layer0)}};
  json["logits_digest"] = absl::StrCat(absl::Hex(request.logits_digest, absl::kZeroPad16));
  json["hit_tiers"] = ToJson(request.hit_tiers);
  json["miss_reasons"] = ToJson(request.miss_reasons);
  for (const auto& [way, result] : request.ways) {
    json["ttft_ms"][way] = result.ttft_ms;
    json["next_token"][way] = result.next_token;
    if (way != "full") json["logits_rel_l2"][way] = result.logits_rel_l2;
  }
  return json;
}

std::string Name(TransitionForm kind) {
  static constexpr const char* kNames[] = {"scalar", "diagonal", "dense", "elementwise", "low_rank", "zero"};
  return kNames[static_cast<size_t>(kind) - 1];
}

double PerSegment(const StoredSegments& stored, uint64_t bytes) {
  return stored.segments == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(stored.segments);
}

void PrintStored(const RunResult& run) {
  constexpr double kKiB = 1024;
  const StoredSegments& stored = run.stored;
  std::printf("\n  a stored segment takes %.0f KiB, in its layers' own forms %.0f KiB; transitions, ε = %.0e:",
              PerSegment(stored, stored.bytes) / kKiB, PerSegment(stored, stored.own_bytes) / kKiB, run.epsilon);
  uint64_t all = 0;
  for (const auto& [form, heads] : stored.heads) all += heads;
  for (const auto& [form, heads] : stored.heads) {
    std::printf("  %s %.0f %%", Name(form).c_str(), 100.0 * static_cast<double>(heads) / static_cast<double>(all));
  }
}

nlohmann::json ToJson(const StoredSegments& stored, double epsilon) {
  nlohmann::json json = {{"epsilon", epsilon},
                         {"segments", stored.segments},
                         {"bytes_per_segment", PerSegment(stored, stored.bytes)},
                         {"own_form_bytes_per_segment", PerSegment(stored, stored.own_bytes)}};
  json["heads"] = nlohmann::json::object();
  for (const auto& [form, heads] : stored.heads) json["heads"][Name(form)] = heads;
  return json;
}

// For requests that were assembled only from the cache.
void PrintAllHit(const RunResult& run) {
  std::printf("\n  time to first token, median of all-hit requests, ms:");
  for (const char* way : kWays) {
    std::printf("  %s %.0f", way,
                Median(Collect(run, Over::kAllHit, [&](const auto& r) { return r.ways.at(way).ttft_ms; })));
  }
  std::printf("\n  speed-up against full recompute, all-hit requests:    %.1f×  (FLOPs alone would allow %.1f×)",
              Median(Collect(run, Over::kAllHit, [](const auto& r) { return r.speedup(); })),
              Median(Collect(run, Over::kAllHit, [](const auto& r) { return r.flop_floor_speedup; })));
}

// Of all hits, the ones from another node.
void PrintRemote(const RunResult& run) {
  if (run.nodes == 1) return;
  const std::map<TierKind, uint64_t> tiers = OfAll(run, &RequestResult::hit_tiers);
  uint64_t found = 0;
  for (const auto& [tier, count] : tiers) found += count;
  const auto remote = tiers.find(TierKind::kRemote);
  std::printf("\n  %zu nodes served in turn; another node had %lu of the %lu segments that were found", run.nodes,
              static_cast<unsigned long>(remote == tiers.end() ? 0 : remote->second),
              static_cast<unsigned long>(found));
}

}  // namespace

void PrintHeader() {
  std::printf("%3s %6s %5s %5s %5s │ %8s %8s %8s %8s │ %7s │ %8s %8s │ %8s │ %s\n", "#", "tokens", "segs", "hits",
              "miss", "full ms", "prefix", "naive", "ashlar", "speedup", "logits", "naive", "layer 0", "same token");
}

void PrintRequest(size_t number, const RequestResult& r) {
  const auto& ways = r.ways;
  std::printf("%3zu %6lu %5lu %5lu %5lu │ %8.0f %8.0f %8.0f %8.0f │ %6.1f× │ %8.4f %8.4f │ %8.1e │ %s\n", number,
              static_cast<unsigned long>(r.tokens), static_cast<unsigned long>(r.segments),
              static_cast<unsigned long>(r.hits), static_cast<unsigned long>(r.misses), ways.at("full").ttft_ms,
              ways.at("prefix").ttft_ms, ways.at("naive").ttft_ms, ways.at("ashlar").ttft_ms, r.speedup(),
              ways.at("ashlar").logits_rel_l2, ways.at("naive").logits_rel_l2,
              r.layer0 ? r.layer0->ashlar : std::nan(""),
              ways.at("ashlar").next_token == ways.at("full").next_token ? "yes" : "no");
  std::fflush(stdout);
}

void PrintSummary(const RunResult& run) {
  const size_t all_hit = Collect(run, Over::kAllHit, [](const RequestResult&) { return 0.0; }).size();
  const Layer0Error layer0 = WorstLayer0(run).value_or(Layer0Error{std::nan(""), std::nan(""), std::nan("")});
  std::printf("\n%zu requests, %zu of %ld sections with every segment cached; %d threads, FMA peak %.0f GFLOP/s\n",
              run.requests.size(), all_hit, static_cast<long>(run.sections_per_prompt), run.threads,
              run.fma_peak_gflops);
  if (all_hit > 0) {
    PrintAllHit(run);
  } else {
    std::printf("\n  no request found all of its segments cached: there is no speed-up to tell");
  }
  std::printf("\n  full recompute runs at %.2f of the FMA peak",
              Median(Collect(run, Over::kEvery, [](const auto& r) { return r.full_flops_ratio; })));
  PrintStored(run);
  Print("segments were found in", OfAll(run, &RequestResult::hit_tiers));
  Print("and missed because", OfAll(run, &RequestResult::miss_reasons));
  PrintRemote(run);
  std::printf("\n\n  layer-0 states behind each interior, worst relative L2:  ashlar %.1e   naive %.2f   T := 0 %.2f",
              layer0.ashlar, layer0.naive, layer0.zero_transition);
  std::printf("\n  first token's logits, mean relative L2:                  naive %.3f",
              Mean(Collect(run, Over::kEvery, [](const auto& r) { return r.ways.at("naive").logits_rel_l2; })));
  for (const auto& [width, error] : run.ashlar_logits_by_width) {
    std::printf("   ashlar (%ld, %ld) %.3f", static_cast<long>(width), static_cast<long>(width), error);
  }
  std::printf(
      "\n  same first token as full recompute:                      prefix %.0f %%   naive %.0f %%   ashlar %.0f %%\n",
      100 * Agreement(run, "prefix"), 100 * Agreement(run, "naive"), 100 * Agreement(run, "ashlar"));
}

nlohmann::json ToJson(const RunResult& run) {
  nlohmann::json json;
  json["requests"] = nlohmann::json::array();
  for (const RequestResult& request : run.requests) json["requests"].push_back(ToJson(request));
  nlohmann::json& summary = json["summary"];
  summary["threads"] = run.threads;
  summary["nodes"] = run.nodes;
  summary["sections"] = run.sections;
  summary["sections_per_prompt"] = run.sections_per_prompt;
  summary["fma_peak_gflops"] = run.fma_peak_gflops;
  summary["all_hit_requests"] = Collect(run, Over::kAllHit, [](const RequestResult&) { return 0.0; }).size();
  for (const char* way : kWays) {
    summary["ttft_ms"][way] =
        Median(Collect(run, Over::kAllHit, [&](const auto& r) { return r.ways.at(way).ttft_ms; }));
    if (std::string(way) != "full") summary["next_token_agreement"][way] = Agreement(run, way);
  }
  summary["speedup_vs_full"] = Median(Collect(run, Over::kAllHit, [](const auto& r) { return r.speedup(); }));
  summary["flop_floor_speedup"] =
      Median(Collect(run, Over::kAllHit, [](const auto& r) { return r.flop_floor_speedup; }));
  summary["full_flops_ratio"] = Median(Collect(run, Over::kEvery, [](const auto& r) { return r.full_flops_ratio; }));
  summary["hit_tiers"] = ToJson(OfAll(run, &RequestResult::hit_tiers));
  if (run.nodes > 1) summary["hit_tiers"].emplace("remote", 0);  // also printed if there was none
  summary["miss_reasons"] = ToJson(OfAll(run, &RequestResult::miss_reasons));
  summary["stored"] = ToJson(run.stored, run.epsilon);
  summary["layer0_state_rel_l2"] = ToJson(WorstLayer0(run));
  summary["logits_rel_l2"]["naive"] =
      Mean(Collect(run, Over::kEvery, [](const auto& r) { return r.ways.at("naive").logits_rel_l2; }));
  for (const auto& [width, error] : run.ashlar_logits_by_width) {
    summary["logits_rel_l2"]["ashlar"][std::to_string(width)] = error;
  }
  return json;
}

}  // namespace ashlar::rag
