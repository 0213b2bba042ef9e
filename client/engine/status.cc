// SPDX-License-Identifier: Apache-2.0
#include "client/engine/status.h"

#include <algorithm>
#include <cstring>

namespace ashlar::engine {

Status MakeStatus(Code code, absl::string_view message) {
  Status status{.code = code};
  const size_t bytes = std::min(message.size(), sizeof status.message - 1);
  std::memcpy(status.message, message.data(), bytes);
  status.message[bytes] = 0;
  return status;
}

Status ToStatus(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return {};
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnavailable:
      return MakeStatus(static_cast<Code>(status.code()), status.message());
    case absl::StatusCode::kDeadlineExceeded:
      return MakeStatus(Code::kUnavailable, status.message());
    case absl::StatusCode::kInternal:
      return MakeStatus(Code::kInternal, status.message());
    default:
      return MakeStatus(Code::kInternal, status.ToString());
  }
}

}  // namespace ashlar::engine
