// SPDX-License-Identifier: Apache-2.0
// Daemon: the whole daemon in one object, so that a test can run it in its own process.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/admin/audit_log.h"
#include "storage/executor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

class Daemon {
 public:
  // Starts with a configuration that ParseConfig accepted. Reload reads `file` again; with an empty `file` it fails.
  // Returns when the sockets and the metrics endpoint accept connections.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const v1::Config& config, const std::string& file = "");

  // Calls Stop(0). If the disk hangs, resources that its threads use are not freed.
  ~Daemon();

  // Refuses new sessions and requests, and writes what is in memory only to the disk (rpc Drain in admin.proto). Waits
  // until nothing is left, `grace` has passed, or `interrupted` returns true. `interrupted` is polled and may block
  // briefly. Logs what is left.
  bool Drain(storage::Nanos grace, const std::function<bool()>& interrupted);

  // Refuses new work, waits at most `grace` for calls in flight, ends every session, waits for transfers in flight, and
  // removes the sockets. Idempotent. Returns false if a disk operation has not returned within another kDiskPatience;
  // the caller must then end the process without destroying this object.
  bool Stop(storage::Nanos grace);
  static constexpr storage::Nanos kDiskPatience = 1'000'000'000;

  // Reloads the configuration file, and logs the changes. Applies all changes or none. `by` is the sender of the
  // signal.
  void Reload(const Operator& by);
  storage::Nanos drain_time() const;  // from the effective configuration

  int metrics_port() const;  // 0 if metrics are not served over TCP

 private:
  struct Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
