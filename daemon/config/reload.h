// SPDX-License-Identifier: Apache-2.0
// Which fields of a configuration may change while the daemon runs.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

struct ConfigChange {
  std::string field;  // "tenants[0].ttl_seconds"
  std::string before, after;
};

// What `next` changes, field by field. FAILED_PRECONDITION names the fields that a running daemon cannot change.
absl::StatusOr<std::vector<ConfigChange>> ChangesFor(const v1::Config& now, const v1::Config& next);

// Their fields in one line, at most eight: "drain_seconds, log.level and 3 more". Without values.
std::string FieldsOf(const std::vector<ConfigChange>& changes);

// The fields that can change, indices of lists left out: "tenants[].ttl_seconds".
const std::vector<std::string>& ReloadableFields();

}  // namespace ashlar::daemon
