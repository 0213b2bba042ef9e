// SPDX-License-Identifier: Apache-2.0
// DecodeByEngine: the reference engine's decode loop, by the recurrence and from buffers.
#pragma once

#include "kernels/device.h"
#include "nlohmann/json.hpp"
#include "tools/bench/bench.h"

namespace ashlar::bench {

// Prints a table and appends its rows: {model, state_bytes, buffer, dtype, copies, chosen, ms_per_token,
// recurrent_ms_per_token, layers_ms, recurrent_layers_ms, speedup, speedup_of_layers, logits_error}. Times are medians
// of a token; the layers' are those of the linear layers' recurrence alone.
void DecodeByEngine(const Options& options, kernels::Workers& workers, nlohmann::json& rows);

}  // namespace ashlar::bench
