// SPDX-License-Identifier: Apache-2.0
// LogLimiter: limits the log lines per message and tenant, so that no tenant can fill the log.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {

// Counts lines per time window. Not thread-safe.
class LogLimiter {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kWindow{60};
  static constexpr uint64_t kLines = 100;   // per message, tenant and window
  static constexpr size_t kMaxKeys = 1024;  // all further messages and tenants share one limit

  struct Summary {
    LogLevel level;
    std::string message, tenant;  // tenant is empty if the line names none
    uint64_t lines = 0;           // suppressed in the window
  };

  // Returns whether the line may be written.
  bool Admit(LogLevel level, absl::string_view message, absl::string_view tenant) {
    Key key(message, tenant);
    auto found = counts_.find(key);
    if (found == counts_.end()) {
      if (counts_.size() >= kMaxKeys) key = {"other messages", ""};
      found = counts_.try_emplace(std::move(key)).first;
    }
    Count& count = found->second;
    count.level = level;
    return ++count.lines <= kLines;
  }

  // Starts the next window if this one has ended, or if `early`, and returns what was suppressed.
  std::vector<Summary> EndWindow(Time now, bool early = false) {
    std::vector<Summary> all;
    if (now - begun_ < kWindow && !early) return all;
    begun_ = now;
    for (const auto& [key, count] : counts_) {
      if (count.lines > kLines) all.push_back({count.level, key.first, key.second, count.lines - kLines});
    }
    counts_.clear();
    return all;
  }

 private:
  using Key = std::pair<std::string, std::string>;
  struct Count {
    LogLevel level{};
    uint64_t lines = 0;
  };
  Time begun_{};
  std::map<Key, Count> counts_;
};

}  // namespace ashlar::daemon
