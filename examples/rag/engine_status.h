// SPDX-License-Identifier: Apache-2.0
// Statuses of the engine API as absl::Status.
#pragma once

#include "absl/status/status.h"
#include "ashlar/engine.h"

namespace ashlar::rag {

// Codes that are not errors become INTERNAL.
inline absl::Status ToStatus(const engine::Status& status) {
  const bool error = status.code < engine::Code::kPending;
  return absl::Status(error ? static_cast<absl::StatusCode>(status.code) : absl::StatusCode::kInternal, status.message);
}

}  // namespace ashlar::rag
