// SPDX-License-Identifier: Apache-2.0
// The daemon's configuration: a YAML file that is read into the message declared in proto/ashlar/v1/config.proto.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Reads YAML, puts the documented default in place of every zero or missing number, and checks the whole: what it
// accepts, a daemon can be started with. INVALID_ARGUMENT names the field.
absl::Status ParseConfig(const std::string& yaml, v1::Config* config);

// Puts variables of the environment in place of ${NAME}, but in comments. INVALID_ARGUMENT names the line, and the
// variable that is not set.
absl::StatusOr<std::string> ExpandEnvironment(const std::string& text);

// Reads a regular file likewise, its variables expanded. NOT_FOUND or PERMISSION_DENIED if it cannot be read.
absl::Status LoadConfig(const std::string& path, v1::Config* config);

// The effective configuration as YAML that ParseConfig accepts.
std::string FormatConfig(const v1::Config& config);

}  // namespace ashlar::daemon
