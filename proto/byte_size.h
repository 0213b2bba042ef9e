// SPDX-License-Identifier: Apache-2.0
// ParseByteSize: parses sizes in the configuration and in options of tools.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Parses a size in bytes, such as "4096", "64GiB", "512 MiB", "1.5g" or "10GB". Units ignore case. K, M, G, T and P,
// also written KiB … and Ki …, are powers of 1024; KB, MB, GB, TB and PB are powers of 1000; no unit, or B, means
// bytes. A fraction is rounded down to whole bytes. The INVALID_ARGUMENT message says what is expected, without a field
// name.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

}  // namespace ashlar
