// SPDX-License-Identifier: Apache-2.0
// Starts calls whose status becomes the job's result, and checks a cache at the beginning of its calls.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "ashlar/engine.h"
#include "client/engine/background.h"
#include "client/engine/boundary.h"
#include "client/engine/cache_state.h"
#include "client/engine/handles.h"
#include "client/engine/status.h"

namespace ashlar::engine {

// Runs a call on a cache that is open, in the process that has opened it.
template <typename Call>
Status OnOpen(CacheState* cache, Call call) noexcept {
  return Guarded([&]() -> Status {
    if (cache == nullptr) return MakeStatus(Code::kFailedPrecondition, "the cache is not open");
    if (Status status = CheckProcess(cache->creator); !status.ok()) return status;
    return call(*cache);
  });
}

// Runs `call`, which returns a status, on one of `threads`, and returns its job. `busy`: the result if no thread is
// free within `patience`. Returns the task; null: it will not run.
template <typename Call>
std::shared_ptr<Background::Task> StartCall(std::unique_ptr<JobState> made, Background& threads, const Status& busy,
                                            std::chrono::milliseconds patience, Call call, Job& job) {
  JobState* const state = made.get();  // the job's end waits for the task
  const auto run = [state, call = std::move(call)] { state->result = Guarded(call); };
  const auto refuse = [state, busy] { state->result = busy; };
  state->task = threads.Start(run, Background::Late{.patience = patience, .otherwise = refuse});
  if (state->task == nullptr) refuse();
  std::shared_ptr<Background::Task> task = state->task;
  Access::Put(std::move(made), job);
  return task;
}

}  // namespace ashlar::engine
