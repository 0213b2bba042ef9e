#include "proto/version.h"

namespace ashlar {

const char* Version() {
  return ASHLAR_VERSION;
}

}  // namespace ashlar
