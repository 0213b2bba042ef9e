// SPDX-License-Identifier: Apache-2.0
// The lines of a file, optionally compressed by zstd.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace ashlar::replay {

// Calls `each` for every line, without its end, until it returns an error, which becomes INVALID_ARGUMENT naming file
// and line. `path` may lack ".zst". NOT_FOUND, DATA_LOSS.
absl::Status ReadLines(const std::string& path, const std::function<absl::Status(const std::string& line)>& each);
bool Exists(const std::string& path);  // with or without ".zst"

}  // namespace ashlar::replay
