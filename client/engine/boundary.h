// SPDX-License-Identifier: Apache-2.0
// The boundary of the engine API, which can be expressed in C: no exception crosses it, and a forked child's copy of a
// handle refuses calls.
#pragma once

#include <exception>

#include "ashlar/engine.h"
#include "client/engine/status.h"
#include "client/session/process_bound.h"

namespace ashlar::engine {

// Runs a call. Exceptions become kResourceExhausted: this library and the standard library throw only if memory or
// threads run out.
template <typename Call>
Status Guarded(Call call) noexcept {
  try {
    return call();
  } catch (const std::exception& thrown) {
    return MakeStatus(Code::kResourceExhausted, thrown.what());
  }
}

// The same for calls without a status.
template <typename Value, typename Call>
Value GuardedOr(Value otherwise, Call call) noexcept {
  try {
    return call();
  } catch (const std::exception&) {
    return otherwise;
  }
}

// Runs work in the background, which has no caller to report to. Runs `otherwise` if it throws.
template <typename Work, typename Otherwise>
void RunOr(Work work, Otherwise otherwise) noexcept {
  try {
    work();
  } catch (const std::exception&) {
    otherwise();
  }
}

// kFailedPrecondition in a child of the process that created the handle: the child has none of the parent's threads,
// and its locks may be held forever.
inline Status CheckProcess(const internal::CreatorProcess& creator) {
  if (!creator.InChild()) return {};
  return MakeStatus(Code::kFailedPrecondition, "made before fork(): it belongs to the parent process");
}

}  // namespace ashlar::engine
