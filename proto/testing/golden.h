// SPDX-License-Identifier: Apache-2.0
// Golden files for tests: bytes in hex under proto/testdata, compared exactly.
//
// A difference means that bytes on a disk or a socket have changed: that needs a new version number (docs/formats.md,
// versions). To rewrite the files on purpose, run the tests with ASHLAR_REGENERATE_GOLDEN=1.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ashlar {

// Fails the running test if `bytes` differ from proto/testdata/<name>.hex.
void ExpectGolden(const std::string& name, absl::string_view bytes);

}  // namespace ashlar
