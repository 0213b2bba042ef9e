// SPDX-License-Identifier: Apache-2.0
// The release of which all programs and libraries of a build are (CMakeLists.txt: project VERSION).
#pragma once

namespace ashlar {

const char* Version();  // "0.2.0"

}  // namespace ashlar
