// SPDX-License-Identifier: Apache-2.0
// Hexadecimal text, as in keys of etcd and in arguments.
#pragma once

#include <string>

#include "absl/base/config.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Returns the bytes that pairs of hexadecimal digits name. Undefined for other text.
inline std::string BytesOfHex(absl::string_view hex) {
#if ABSL_LTS_RELEASE_VERSION >= 20240722  // the other form is deprecated there, and the only one before
  std::string bytes;
  return absl::HexStringToBytes(hex, &bytes) ? bytes : std::string();
#else
  return absl::HexStringToBytes(hex);
#endif
}

}  // namespace ashlar
