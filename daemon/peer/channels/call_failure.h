// SPDX-License-Identifier: Apache-2.0
// CallFailure: what the error of a call to another node says about that node.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::daemon {

enum class CallFailure : uint8_t {
  kTenant,  // one of the two nodes does not share the tenant with the other; calls for other tenants go on
  kBusy,    // as many calls are under way as may be: it may be made again
  kNode,    // the node, or the way to it, is ill
};

// `error`: not OK.
inline CallFailure WhatFailed(const absl::Status& error) {
  if (absl::IsPermissionDenied(error) || absl::IsNotFound(error)) return CallFailure::kTenant;
  if (absl::IsResourceExhausted(error)) return CallFailure::kBusy;
  return CallFailure::kNode;
}

}  // namespace ashlar::daemon
