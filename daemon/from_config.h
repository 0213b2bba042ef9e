// SPDX-License-Identifier: Apache-2.0
// Converts the configuration to the options of the daemon's parts.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/session/session_protocol.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

std::vector<std::string> TenantNames(const v1::Config& config);  // index is the TenantId

// `residence` may be null.
storage::CacheOptions OptionsFrom(const v1::Config& config, storage::ReportResidence residence);

uint64_t HbmBytes(const v1::Config& config);  // capacity of all hbm tiers

// Returns a tenant's share of a bound on queued work.
size_t ShareOf(size_t bound, const v1::Config& config);

std::map<uid_t, TenantUser> TenantsByUid(const v1::Config& config);

void SetCallRates(const v1::Config& config, storage::Rates* rates);

}  // namespace ashlar::daemon
