// SPDX-License-Identifier: Apache-2.0
// LogLimiter: bounds how many log lines one event of one tenant leaves, so that no tenant fills the log.
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

// Counts in windows of time. Not thread-safe.
class LogLimiter {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kWindow{60};
  static constexpr uint64_t kLines = 100;   // of one message and tenant in a window
  static constexpr size_t kMaxKeys = 1024;  // all further messages and tenants share one bound

  struct Summary {
    LogLevel level;
    std::string message, tenant;  // the tenant is empty where lines name none
    uint64_t lines = 0;           // suppressed in the window
  };

  // Returns whether a line may be written now.
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

  // When the window is over, or `early`: begins the next one, and returns what was suppressed in this one.
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
