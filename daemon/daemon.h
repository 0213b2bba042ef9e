// SPDX-License-Identifier: Apache-2.0
// The whole daemon in one object, so that a test can run it in its own process.
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
  // Starts with a configuration that ParseConfig completed and accepted; Reload reads `file` again (empty: it cannot).
  // Returns when its sockets and the metrics endpoint answer.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const v1::Config& config, const std::string& file = "");

  // Stop(0). Behind a disk that hangs nothing is given back: its threads still use it.
  ~Daemon();

  // Takes no new sessions and requests, and writes to the disk what memory has alone (rpc Drain in admin.proto). Waits
  // until nothing is left, `grace` is over, or `interrupted` says so, which is asked over and over and takes its time
  // each. Logs what is left.
  bool Drain(storage::Nanos grace, const std::function<bool()>& interrupted);

  // Accepts nothing new, lets calls in flight finish for at most `grace`, ends every session, awaits the transfers in
  // flight, and removes the sockets. Idempotent. False: the disk has not returned from some call within kDiskPatience
  // more; then end the process without destroying this.
  bool Stop(storage::Nanos grace);
  static constexpr storage::Nanos kDiskPatience = 1'000'000'000;

  // Takes over what has changed in the configuration's file, or nothing, and logs which; `by` sent a signal.
  void Reload(const Operator& by);
  storage::Nanos drain_time() const;  // as the configuration has it now

  int metrics_port() const;  // 0 where metrics are not served

 private:
  struct Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
