// SPDX-License-Identifier: Apache-2.0
// CompareApis: ashlar/engine.h and ashlar/client.h, call by call.
#pragma once

#include "absl/status/status.h"
#include "ashlar/client.h"
#include "nlohmann/json.hpp"
#include "tools/bench/bench.h"

namespace ashlar::bench {

// Puts and gets values through either, in turn; prints a table and appends its rows: {op, bytes, values, client_us,
// engine_us, ratio}, medians.
absl::Status CompareApis(Client& client, const Options& options, nlohmann::json& rows);

}  // namespace ashlar::bench
