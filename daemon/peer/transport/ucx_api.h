// SPDX-License-Identifier: Apache-2.0
// Conversions between UCX's C API and C++.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdio>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

absl::Status ToStatus(ucs_status_t status, absl::string_view what);

inline ucs_memory_type_t UcsTypeOf(MemoryType type) {
  return type == MemoryType::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

// Returns the text that `print` writes to its file.
std::string Printed(absl::FunctionRef<void(FILE*)> print);

}  // namespace ashlar::daemon
