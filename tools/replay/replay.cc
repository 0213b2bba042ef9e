// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/replay.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"
#include "storage/prefix/prefix_tree.h"
#include "tools/replay/optimum.h"

namespace ashlar::replay {
namespace {

struct Nothing {};

absl::StatusOr<Run> RunOne(const Trace& trace, const std::vector<uint64_t>& shared, const Model& model,
                           const RunSpec& spec, const std::function<void()>& requested) {
  absl::StatusOr<std::unique_ptr<Policy>> policy =
      MakePolicy(spec.policy, model.costs, spec.capacity_bytes, spec.capture);
  if (!policy.ok()) return policy.status();
  Run run{.trace = trace.name(), .policy = spec.policy, .capacity_bytes = spec.capacity_bytes, .capture = spec.capture};
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < trace.requests().size(); ++i) {
    const uint64_t prompt = trace.Tokens(trace.requests()[i], tokens);
    const uint64_t resumed = (*policy)->Request(tokens, prompt);
    if (resumed > shared[i]) return absl::InternalError(absl::StrCat(spec.policy, ": resumed past the shared prefix"));
    if ((*policy)->usage().peak_bytes > spec.capacity_bytes) {
      return absl::InternalError(
          absl::StrCat(spec.policy, ": exceeds its capacity of ", spec.capacity_bytes, " bytes"));
    }
    ++run.requests;
    run.requests_hit += resumed > 0 ? 1 : 0;
    run.tokens += prompt;
    run.tokens_hit += resumed;
    run.tokens_never_seen += prompt - shared[i];
    run.tokens_lost += shared[i] - resumed;
    const double all = model.costs.Flops(prompt), saved = model.costs.Flops(resumed);
    run.flops_all += all;
    run.flops_saved += saved;
    run.first_token_ms.push_back((all - saved) / model.flops_per_second * 1e3);
    requested();
  }
  run.usage = (*policy)->usage();
  run.tuning = (*policy)->tuning();
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return run;
}

// Runs the variants of a policy, and returns the one with the highest token hit rate.
absl::StatusOr<Run> RunBest(const Trace& trace, const std::vector<uint64_t>& shared, const Model& model,
                            const RunSpec& spec, const std::function<void()>& requested) {
  std::optional<Run> best;
  for (const std::string& variant : Variants(spec.policy)) {
    absl::StatusOr<Run> run = RunOne(trace, shared, model, {variant, spec.capacity_bytes, spec.capture}, requested);
    if (!run.ok()) return run;
    if (!best || run->tokens_hit > best->tokens_hit) best = *std::move(run);
  }
  best->policy = spec.policy;
  return *best;
}

}  // namespace

double Quantile(std::vector<double> values, double q) {
  const auto at = values.begin() + static_cast<ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

std::vector<uint64_t> SharedTokens(const Trace& trace) {
  storage::PrefixTree<Nothing> tree;
  std::vector<uint64_t> shared;
  std::vector<int32_t> tokens;
  for (const Trace::Request& request : trace.requests()) {
    const uint64_t prompt = trace.Tokens(request, tokens);
    shared.push_back(tree.Walk(std::span(tokens).first(prompt)).depth);
    tree.Insert(tokens);
  }
  return shared;
}

absl::StatusOr<std::vector<Run>> Replay(const Trace& trace, const Model& model, const std::vector<RunSpec>& specs,
                                        int threads, const std::function<void(uint64_t, uint64_t)>& progress) {
  const std::vector<uint64_t> shared = SharedTokens(trace);
  uint64_t all = 0;
  for (const RunSpec& spec : specs) all += Variants(spec.policy).size() * trace.requests().size();
  std::vector<Run> runs(specs.size());
  struct {
    Mutex mutex;
    absl::Status failed ABSL_GUARDED_BY(mutex);
    uint64_t requests ABSL_GUARDED_BY(mutex) = 0;
  } done;
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < specs.size(); i = next++) {
      const absl::StatusOr<Run> run = RunBest(trace, shared, model, specs[i], [&] {
        MutexLock lock(done.mutex);
        progress(++done.requests, all);
      });
      MutexLock lock(done.mutex);
      if (run.ok()) {
        runs[i] = *run;
      } else {
        done.failed.Update(run.status());
      }
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  MutexLock lock(done.mutex);
  if (!done.failed.ok()) return done.failed;
  std::map<uint64_t, Optimum> optima;                         // by granularity
  std::map<std::pair<uint64_t, uint64_t>, double> hit_rates;  // by granularity and capacity
  for (Run& run : runs) {
    const Optimum& optimum = optima.try_emplace(run.capture, trace, model.costs, run.capture).first->second;
    const auto [at, added] = hit_rates.try_emplace({run.capture, run.capacity_bytes}, 0);
    if (added) at->second = optimum.TokenHitRate(run.capacity_bytes);
    run.optimum = at->second;
  }
  return runs;
}

}  // namespace ashlar::replay
