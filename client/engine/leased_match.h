// SPDX-License-Identifier: Apache-2.0
// LeasedMatch: what a request's lookup has found, under a lease that lasts until it is released and no commit uses it.
#pragma once

#include <optional>
#include <utility>

#include "client/session/match.h"
#include "kernels/mutex.h"

namespace ashlar::engine {

class LeasedMatch {
 public:
  void Take(ashlar::Match match) { match_ = std::move(match); }

  const ashlar::Match* get() const { return match_.has_value() ? &*match_ : nullptr; }  // null: nothing was looked up
  const ashlar::Match& operator*() const { return *match_; }
  const ashlar::Match* operator->() const { return &*match_; }

  // Ends the lease, with the last commit in progress.
  void Release() {
    MutexLock lock(mutex_);
    release_later_ = commits_ > 0;
    if (match_.has_value() && commits_ == 0) match_->Release();
  }
  void BeginCommit() {
    MutexLock lock(mutex_);
    ++commits_;
  }
  // On any thread.
  void EndCommit() {
    MutexLock lock(mutex_);
    if (--commits_ == 0 && release_later_ && match_.has_value()) match_->Release();
  }

 private:
  std::optional<ashlar::Match> match_;
  Mutex mutex_;
  int commits_ ABSL_GUARDED_BY(mutex_) = 0;  // commits in progress
  bool release_later_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ashlar::engine
