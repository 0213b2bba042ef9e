// SPDX-License-Identifier: Apache-2.0
// The report of the main job: one line per request, a summary, and the same numbers in JSON.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "examples/rag/fidelity.h"
#include "nlohmann/json.hpp"
#include "proto/outcome.h"

namespace ashlar::rag {

// One way of serving one request.
struct WayResult {
  double ttft_ms = 0;
  int32_t next_token = 0;
  double logits_rel_l2 = 0;  // against full recompute
};

struct RequestResult {
  std::string question;
  size_t node = 0;  // node of the request's engine
  uint64_t tokens = 0;
  uint64_t segments = 0;  // instructions and sections
  uint64_t hits = 0, misses = 0;
  std::map<TierKind, uint64_t> hit_tiers;
  std::map<MissReason, uint64_t> miss_reasons;
  uint64_t computed_tokens = 0;           // without filled segments
  std::map<std::string, WayResult> ways;  // full, prefix, naive, ashlar
  std::optional<Layer0Error> layer0;      // empty if no interior was landed
  uint64_t logits_digest = 0;             // digest of Ashlar's logits
  double full_flops_ratio = 0;            // FLOP/s of full recompute over the machine's FMA peak
  double flop_floor_speedup = 0;          // FLOPs of full recompute divided by those of seams and query
  uint64_t landed = 0;                    // segments that were set from the cache in the end
  bool all_hit() const { return misses == 0 && landed == segments; }
  double speedup() const { return ways.at("full").ttft_ms / ways.at("ashlar").ttft_ms; }
};

struct RunResult {
  std::vector<RequestResult> requests;
  // Mean logits error over all requests by seam width, head = tail. Naive addition has no seams: one number.
  std::map<int64_t, double> ashlar_logits_by_width;
  double fma_peak_gflops = 0;
  int threads = 0;
  int64_t sections = 0;
  int64_t sections_per_prompt = 0;
  size_t nodes = 1;
  double epsilon = 0;
  StoredSegments stored;
};

void PrintHeader();
void PrintRequest(size_t number, const RequestResult& request);
// Times to first token and speed-ups are medians over the all-hit requests of sections_per_prompt sections; the other
// figures are over all requests.
void PrintSummary(const RunResult& run);
nlohmann::json ToJson(const RunResult& run);

}  // namespace ashlar::rag
