#include "daemon/request_fields.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {

absl::StatusOr<storage::LeaseId> ReadLease(absl::string_view field, const std::string& bytes) {
  storage::LeaseId lease;
  if (bytes.size() != lease.size()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": not ", lease.size(), " bytes"));
  }
  std::memcpy(lease.data(), bytes.data(), lease.size());
  return lease;
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(absl::string_view field, const std::string& bytes) {
  if (bytes.size() > limits::kMaxPromptTokens * sizeof(int32_t)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": more than ", limits::kMaxPromptTokens, " tokens"));
  }
  absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(bytes);
  if (!tokens.ok()) return absl::InvalidArgumentError(absl::StrCat(field, ": not a whole number of int32"));
  return tokens;
}

}  // namespace ashlar::daemon
