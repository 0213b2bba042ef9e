// SPDX-License-Identifier: Apache-2.0
#include "client/engine/chain.h"

#include <algorithm>

namespace ashlar::engine {
namespace {

// Appends the run up to `end`, cut at captures. Removes the captures at or before `end`.
void Compute(uint64_t end, std::span<const uint64_t>& captures, std::vector<Step>& steps) {
  uint64_t begin = steps.empty() ? 0 : steps.back().end;
  while (begin < end) {
    while (!captures.empty() && captures.front() <= begin) captures = captures.subspan(1);
    const bool cut = !captures.empty() && captures.front() <= end;
    const uint64_t until = cut ? captures.front() : end;
    steps.push_back({.kind = StepKind::kCompute, .capture = cut, .begin = begin, .end = until});
    begin = until;
  }
}

}  // namespace

std::vector<Step> BuildSteps(uint64_t tokens, std::span<const CachedRun> cached, std::span<const uint64_t> captures) {
  std::vector<Step> steps;
  for (const CachedRun& run : cached) {
    const uint64_t stands = steps.empty() ? 0 : steps.back().end;
    if (run.begin < stands || run.end <= run.begin || run.end > tokens) continue;
    Compute(run.begin, captures, steps);
    const auto at_end = std::ranges::find(captures, run.end);
    steps.push_back({.kind = run.whole ? StepKind::kCheckpoint : StepKind::kInterior,
                     .capture = at_end != captures.end(),
                     .segment = run.segment,
                     .begin = run.begin,
                     .end = run.end});
  }
  Compute(tokens, captures, steps);
  return steps;
}

}  // namespace ashlar::engine
