// SPDX-License-Identifier: Apache-2.0
// WaitForPort: waits for a TCP port that another process is about to release.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Longest time that a starting daemon waits for a port. A killed daemon holds its ports until the kernel has freed its
// memory.
inline constexpr storage::Nanos kPortPatience = 5'000'000'000;

// Calls `in_use`, which tries to listen, until it returns false or `patience` has passed. Logs `what` once if it waits.
void WaitForPort(absl::string_view what, storage::Nanos patience, absl::FunctionRef<bool()> in_use);

}  // namespace ashlar::daemon
