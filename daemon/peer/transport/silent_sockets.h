// SPDX-License-Identifier: Apache-2.0
// SilentSockets: closes TCP connections accepted by UCX whose peer sends nothing. UCX accepts without a limit and waits
// without a deadline, so any host that reaches its ports could exhaust the descriptors.
#pragma once

#include <dirent.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

namespace ashlar::daemon {

class SilentSockets {
 public:
  static constexpr size_t kOfAnAddress = 32;  // silent connections per IP address, whatever their age

  // `listening` are the listening sockets. A UCX peer sends immediately.
  explicit SilentSockets(const std::set<int>& listening,
                         std::chrono::milliseconds patience = std::chrono::milliseconds(5'000));

  // Closes connections to these sockets that have received nothing within the patience, or are too many. Returns their
  // number. It scans every descriptor of the process: call it about once per second.
  size_t End();

 private:
  struct CloseFolder {
    void operator()(DIR* folder) const { closedir(folder); }
  };

  const std::chrono::milliseconds patience_;
  std::set<uint16_t> ports_;
  const std::unique_ptr<DIR, CloseFolder> folder_;  // opened while descriptors are left
};

}  // namespace ashlar::daemon
