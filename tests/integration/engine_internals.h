// SPDX-License-Identifier: Apache-2.0
// Access to what is behind the engine API.
#pragma once

#include <cstdint>

#include "ashlar/engine.h"
#include "client/session/client.h"

namespace ashlar::integration {

// Opens a cache on a client that outlives it, in a region of that client with the pages at the options' places; the
// options name no sockets.
engine::Status OpenOn(Client& client, const Region& region, const engine::OpenOptions& options, engine::Cache* out);
// Returns how many layers the daemon has advanced for this cache.
uint64_t DaemonAdvances(const engine::Cache& cache);

}  // namespace ashlar::integration
