// SPDX-License-Identifier: Apache-2.0
// Decides which configuration fields can change without a restart.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

struct ConfigChange {
  std::string field;  // such as "tenants[0].ttl_seconds"
  std::string before, after;
};

// Returns the changes from `now` to `next`, one per field. FAILED_PRECONDITION names the fields that need a restart.
absl::StatusOr<std::vector<ConfigChange>> ChangesFor(const v1::Config& now, const v1::Config& next);

// Returns the names of the changed fields on one line, at most eight: "drain_seconds, log.level and 3 more".
std::string FieldsOf(const std::vector<ConfigChange>& changes);

// The fields that can change without a restart, without list indices: "tenants[].ttl_seconds".
const std::vector<std::string>& ReloadableFields();

}  // namespace ashlar::daemon
