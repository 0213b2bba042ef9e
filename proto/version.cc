// SPDX-License-Identifier: Apache-2.0
#include "proto/version.h"

namespace ashlar {

const char* Version() {
  return ASHLAR_VERSION;
}

}  // namespace ashlar
