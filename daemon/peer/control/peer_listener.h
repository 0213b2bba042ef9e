// SPDX-License-Identifier: Apache-2.0
// PeerListener: accepts peers' TCP connections, bounds them, and tells of their ends. gRPC alone would accept all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/runtime/host_port.h"
#include "daemon/runtime/unique_fd.h"
#include "storage/executor.h"

namespace ashlar::daemon {

class PeerListener {
 public:
  static constexpr size_t kConnections = 1024;  // of all; more are closed at once
  static constexpr size_t kOfAnAddress = 64;    // of one IP address, however many nodes it has

  // All are called on the listener's thread. `address` names a connection as gRPC does: ipv4:10.0.0.1:5000.
  struct Events {
    std::function<void(UniqueFd socket, const std::string& address)> admit;
    std::function<void(const std::string& address)> refused;  // too many
    std::function<void(const std::string& address)> ended;    // of one that was admitted
    std::function<void()> tick;                               // about every `period`
  };
  // UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<PeerListener>> Start(const HostPort& at, storage::Nanos period, Events events);
  // Accepts no more. Connections stay as they are.
  ~PeerListener();

  uint16_t port() const;

 private:
  struct Impl;
  explicit PeerListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
