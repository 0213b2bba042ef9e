// SPDX-License-Identifier: Apache-2.0
// Names of tenants and sessions for tests.
#pragma once

#include "storage/ids.h"

namespace ashlar::storage {

inline constexpr TenantId kTenant = 1, kOther = 2;
inline constexpr SessionId kAnn = 1, kBob = 2, kEve = 3;  // Eve is another tenant's

}  // namespace ashlar::storage
