// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/grant.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

namespace ashlar::daemon {

bool SameGrant(const Grant& a, const Grant& b) {
  uint8_t difference = a.number != b.number;
  for (size_t i = 0; i < a.secret.size(); ++i) difference |= a.secret[i] ^ b.secret[i];
  return difference == 0;
}

std::array<uint8_t, 16> DrawSecret() {
  std::array<uint8_t, 16> secret;
  // Such a short request is complete, or fails if a signal interrupts it before the kernel's source is ready.
  ssize_t drawn = 0;
  do {
    drawn = getrandom(secret.data(), secret.size(), 0);
  } while (drawn < 0 && errno == EINTR);
  if (drawn != static_cast<ssize_t>(secret.size())) std::abort();  // a guessable secret would be worse
  return secret;
}

}  // namespace ashlar::daemon
