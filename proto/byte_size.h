// SPDX-License-Identifier: Apache-2.0
// Sizes as people write them: in the configuration and in the options of every tool.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Bytes of "4096", "64GiB", "512 MiB", "1.5g", "10GB". Units ignore case. K, M, G, T and P, also written KiB … and Ki
// …, are powers of 1024; KB, MB, GB, TB and PB are powers of 1000; none, or B: bytes. A fraction is rounded down to
// whole bytes. INVALID_ARGUMENT says what is expected, without a field's name.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

}  // namespace ashlar
