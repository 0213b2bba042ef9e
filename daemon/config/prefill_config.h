// SPDX-License-Identifier: Apache-2.0
// Defaults and checks of the configuration field `prefill`.
#pragma once

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

void FillPrefillDefaults(v1::Config* config);
// INVALID_ARGUMENT names the field.
absl::Status CheckPrefill(const v1::Config& config);

}  // namespace ashlar::daemon
