// SPDX-License-Identifier: Apache-2.0
// The files that `ashlarctl explain` reads.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ashlar::ctl {

// The whole file; the status names it.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Token ids, packed as they travel: from text, decimal numbers between white space, commas or brackets (so that a JSON
// array will do); or from the file as it is, int32 little endian, where `binary`. INVALID_ARGUMENT names the file.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path, bool binary);

// An engine's declarations: the canonical encodings of its identity and of its layout, each after its length (u32,
// little endian).
struct ModelFile {
  std::string identity;
  std::string layout;
};
absl::StatusOr<ModelFile> ReadModelFile(const std::string& path);

}  // namespace ashlar::ctl
