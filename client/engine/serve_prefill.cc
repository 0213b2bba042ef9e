// SPDX-License-Identifier: Apache-2.0
// Cache::ServePrefill: an engine that computes segments for others.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/started_call.h"

namespace ashlar::engine {
namespace {

Status CheckServing(const CacheState& cache, const Request* work) {
  if (work == nullptr) return Invalid("work: null");
  if (cache.tensor_parallel_size > 1) {
    return MakeStatus(Code::kFailedPrecondition, "one tensor-parallel rank of several cannot prefill for others");
  }
  return {};
}

// Waits for a segment that this engine may publish, and reserves it, unless another process publishes it.
Status ServeOne(CacheState& cache, std::chrono::milliseconds wait, Request& work) {
  constexpr std::chrono::milliseconds kMoment{50};
  const auto until = std::chrono::steady_clock::now() + wait;
  while (true) {
    std::vector<PrefillResult> results;
    {
      MutexLock lock(cache.stored_mutex);
      results.swap(cache.served);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    absl::StatusOr<std::optional<PrefillWork>> given =
        cache.model.ServePrefill(results, std::max(left, std::chrono::milliseconds(0)));
    if (!given.ok()) {
      {
        MutexLock lock(cache.stored_mutex);  // the next call reports them
        cache.served.insert(cache.served.begin(), results.begin(), results.end());
      }
      std::this_thread::sleep_for(std::min(kMoment, wait));
      return ToStatus(given.status());
    }
    if (!given->has_value()) return {.code = Code::kPending};
    PrefillWork& asked = **given;
    Reservation reservation;
    if (cache.publishes()) {
      const ObjectRun run{.kind = asked.kind, .tokens = asked.tokens, .media = {}};
      reservation = cache.model.Reserve({&run, 1}).front();
      if (!reservation.granted()) {
        const bool there = reservation.outcome == ReserveOutcome::kAlreadyPresent;
        cache.Served({.assignment = asked.assignment, .generation = asked.generation}, there);
        continue;
      }
    }
    auto prompt_run = std::make_shared<PromptRun>(cache);
    prompt_run->Take(std::move(asked), reservation);
    Access::Put(
        new RequestState{.cache = cache.shared_from_this(), .prompt_run = std::move(prompt_run), .starting = nullptr},
        work);
    return {};
  }
}

}  // namespace

Status Cache::ServePrefill(uint32_t wait_ms, Request* work) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (Status status = CheckServing(cache, work); !status.ok()) return status;
    *work = Request();  // the previous work has its result
    return ServeOne(cache, std::chrono::milliseconds(wait_ms), *work);
  });
}

Status Cache::StartServePrefill(uint32_t wait_ms, Request* work, Job* job) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (Status status = CheckServing(cache, work); !status.ok()) return status;
    if (job == nullptr) return Invalid("job: null");
    *work = Request();
    const std::chrono::milliseconds wait(wait_ms);
    auto made = std::make_unique<JobState>(JobState{.cache = cache.shared_from_this(), .task = nullptr});
    const auto serve = [&cache, wait, work] { return ServeOne(cache, wait, *work); };
    StartCall(std::move(made), cache.serving, {.code = Code::kPending}, wait + cache.patience, serve, *job);
    return {};
  });
}

}  // namespace ashlar::engine
