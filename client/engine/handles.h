// SPDX-License-Identifier: Apache-2.0
// RequestState, which a Request points to, and Access to what the handles point to.
#pragma once

#include <memory>

#include "ashlar/engine.h"
#include "client/engine/background.h"
#include "client/engine/cache_state.h"
#include "client/engine/prompt_run.h"
#include "client/session/process_bound.h"

namespace ashlar::engine {

struct RequestState {
  std::shared_ptr<CacheState> cache;  // destroyed last
  std::shared_ptr<PromptRun> prompt_run;
  std::shared_ptr<Background::Task> starting;  // null: no task is starting, or it has ended
  internal::CreatorProcess creator{};
};

// For the C and Python bindings, and for tests.
struct Access {
  static CacheState* Of(const Cache& cache) { return cache.impl_; }
  static std::shared_ptr<PromptRun> Shared(const Request& request) {
    return request.impl_ == nullptr ? nullptr : request.impl_->prompt_run;
  }
  // Null while it is being started.
  static const PromptRun* Settled(const Request& request) {
    const RequestState* const state = request.impl_;
    const bool settled = state != nullptr && (state->starting == nullptr || state->starting->done());
    return settled ? state->prompt_run.get() : nullptr;
  }
  static PromptRun* Of(const Request& request) { return Shared(request).get(); }
  static void Put(CacheState* impl, Cache& cache) { cache.impl_ = impl; }
  static void Put(RequestState* impl, Request& request);
  static void Put(std::unique_ptr<JobState> impl, Job& job);
};

}  // namespace ashlar::engine
