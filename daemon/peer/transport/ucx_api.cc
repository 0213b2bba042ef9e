// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx_api.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

absl::Status ToStatus(ucs_status_t status, absl::string_view what) {
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

std::string Printed(absl::FunctionRef<void(FILE*)> print) {
  char* text = nullptr;
  size_t size = 0;
  FILE* file = open_memstream(&text, &size);
  if (file == nullptr) return "";
  print(file);
  std::fclose(file);
  std::string result(text, size);
  std::free(text);
  return result;
}

}  // namespace ashlar::daemon
