// SPDX-License-Identifier: Apache-2.0
// What the parts of a daemon are made with, as its configuration says.
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

std::vector<std::string> TenantNames(const v1::Config& config);  // by TenantId

// `residence` may be null: nobody is told.
storage::CacheOptions OptionsFrom(const v1::Config& config, storage::TellResidence residence);

uint64_t HbmBytes(const v1::Config& config);  // of all its hbm tiers

// Of a bound on what may wait, what a tenant has for itself.
size_t ShareOf(size_t bound, const v1::Config& config);

std::map<uid_t, TenantUser> TenantsByUid(const v1::Config& config);

void SetCallRates(const v1::Config& config, storage::Rates* rates);

}  // namespace ashlar::daemon
