// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/port_wait.h"

#include <chrono>
#include <thread>

#include "daemon/runtime/log.h"

namespace ashlar::daemon {

void WaitForPort(absl::string_view what, storage::Nanos patience, absl::FunctionRef<bool()> in_use) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(patience);
  bool logged = false;
  while (in_use() && std::chrono::steady_clock::now() < end) {
    if (!logged) {
      Log(LogLevel::kWarning, "the port is in use; waiting until it is free",
          {{"address", what}, {"seconds", patience / 1'000'000'000}});
      logged = true;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace ashlar::daemon
