#include "daemon/security/tls.h"

#include <gtest/gtest.h>

namespace ashlar::daemon {
namespace {}
}  // namespace ashlar::daemon
