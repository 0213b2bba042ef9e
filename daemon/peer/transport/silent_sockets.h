// SPDX-License-Identifier: Apache-2.0
// SilentSockets: ends TCP connections that UCX has accepted and whose other end says nothing. UCX accepts without a
// limit and waits without a deadline, so that anything that reaches its ports could take every descriptor.
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
  static constexpr size_t kOfAnAddress = 32;  // silent connections of one IP address, whatever their age

  // `listening`: the listening sockets. A peer that is one of UCX's says something at once.
  explicit SilentSockets(const std::set<int>& listening,
                         std::chrono::milliseconds patience = std::chrono::milliseconds(5'000));

  // Ends the connections to these sockets that have received nothing within the patience, or are too many. Returns how
  // many. It looks at every descriptor of the process: call it about once a second.
  size_t End();

 private:
  struct CloseFolder {
    void operator()(DIR* folder) const { closedir(folder); }
  };

  const std::chrono::milliseconds patience_;
  std::set<uint16_t> ports_;
  const std::unique_ptr<DIR, CloseFolder> folder_;  // opened while there are descriptors left
};

}  // namespace ashlar::daemon
