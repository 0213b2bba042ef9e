// SPDX-License-Identifier: Apache-2.0
// The version of all programs and libraries of this build (CMakeLists.txt: project VERSION).
#pragma once

namespace ashlar {

const char* Version();  // "0.2.0"

}  // namespace ashlar
