// SPDX-License-Identifier: Apache-2.0
// PeerListener: accepts TCP connections of peers, limits their number, and reports when they end. gRPC alone accepts
// all.
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
  static constexpr size_t kConnections = 1024;  // total; further ones are closed immediately
  static constexpr size_t kOfAnAddress = 64;    // per IP address, regardless of the number of nodes

  // All are called on the listener's thread. `address` names a connection in gRPC's form: ipv4:10.0.0.1:5000.
  struct Events {
    std::function<void(UniqueFd socket, const std::string& address)> admit;
    std::function<void(const std::string& address)> refused;  // too many connections
    std::function<void(const std::string& address)> ended;    // an admitted connection has ended
    std::function<void()> tick;                               // about once per `period`
  };
  // UNAVAILABLE if the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<PeerListener>> Start(const HostPort& at, storage::Nanos period, Events events);
  // Stops accepting. Open connections are not affected.
  ~PeerListener();

  uint16_t port() const;

 private:
  struct Impl;
  explicit PeerListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
