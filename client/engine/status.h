// SPDX-License-Identifier: Apache-2.0
// Statuses of the engine API: a code and a message of bounded length.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ashlar/engine.h"

namespace ashlar::engine {

// Longer messages are cut at their end.
Status MakeStatus(Code code, absl::string_view message);
// Codes that the API does not have become kInternal.
Status ToStatus(const absl::Status& status);
inline Status Pending() {
  return {.code = Code::kPending};
}

// kInvalidArgument: "field: what is wrong".
template <typename... Args>
Status Invalid(const Args&... parts) {
  return MakeStatus(Code::kInvalidArgument, absl::StrCat(parts...));
}

}  // namespace ashlar::engine
