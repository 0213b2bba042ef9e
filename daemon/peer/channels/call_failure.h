// SPDX-License-Identifier: Apache-2.0
// CallFailure: classifies the error of a call to another node.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::daemon {

enum class CallFailure : uint8_t {
  kTenant,  // one of the two nodes does not share the tenant with the other; calls for other tenants continue
  kBusy,    // too many calls are in flight; the call may be repeated
  kNode,    // the node or the network has failed
};

// `error` must not be OK.
inline CallFailure WhatFailed(const absl::Status& error) {
  if (absl::IsPermissionDenied(error) || absl::IsNotFound(error)) return CallFailure::kTenant;
  if (absl::IsResourceExhausted(error)) return CallFailure::kBusy;
  return CallFailure::kNode;
}

}  // namespace ashlar::daemon
