// SPDX-License-Identifier: Apache-2.0
// Invalid: refuses bad input with INVALID_ARGUMENT and a message that names the field first.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar {

// Parts are joined like absl::StrCat does: Invalid("page_table[", i, "]: not in the region").
template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace ashlar
