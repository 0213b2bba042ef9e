// SPDX-License-Identifier: Apache-2.0
// Reads the daemon's configuration: a YAML file with the fields of proto/ashlar/v1/config.proto.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Parses YAML, sets the documented default in every zero or missing number, and checks the result. A daemon can start
// with any configuration that passes. INVALID_ARGUMENT names the field.
absl::Status ParseConfig(const std::string& yaml, v1::Config* config);

// Replaces ${NAME} by the environment variable, except in comments. INVALID_ARGUMENT names the line and the unset
// variable.
absl::StatusOr<std::string> ExpandEnvironment(const std::string& text);

// Parses a regular file after expanding its variables. NOT_FOUND or PERMISSION_DENIED if it cannot be read.
absl::Status LoadConfig(const std::string& path, v1::Config* config);

// Returns the effective configuration as YAML that ParseConfig accepts.
std::string FormatConfig(const v1::Config& config);

}  // namespace ashlar::daemon
