// SPDX-License-Identifier: Apache-2.0
// LocalDaemon: a private ashlard for one run of a tool, started in a fresh folder under /tmp and removed with it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "examples/testing/child_process.h"

namespace ashlar::tools {

struct LocalDaemonOptions {
  std::string binary;                    // empty: `ashlard` beside the running program
  uint64_t dram_bytes = 2u << 30;        // capacity, all of it the caller's
  uint64_t hbm_bytes = 0;                // 0: no such tier
  uint64_t ssd_bytes = 0;                // 0: no such tier
  std::string ssd_folder;                // empty: in the daemon's own folder, deleted with it
  std::string admission = "second_use";  // policy of the ssd tier; the daemon's default
  std::string eviction = "price";        // price or lru; the daemon's default
  uint32_t threads = 0;                  // workers; 0: the daemon's default
  std::string tenants;                   // YAML of the field `tenants`; empty: one tenant, the daemon's user
  std::string cluster;                   // YAML of the field `cluster`; empty: no other node
  bool metrics = false;                  // on a loopback port
  // The user that runs it; none: the caller. Tenants' users need that user's group for its sockets.
  std::optional<ProcessUser> user;
  uint64_t open_files = 0;  // RLIMIT_NOFILE; 0: the caller's
  uint64_t data_bytes = 0;  // RLIMIT_DATA: its own memory, without memory shared with engines; 0: the caller's
};

// The sockets that engines of a daemon connect to.
struct DaemonSockets {
  std::string rpc_socket, session_socket;
};

class LocalDaemon {
 public:
  // Returns once the daemon accepts sessions, of any tenant. DEADLINE_EXCEEDED, or the error that it logged, if it does
  // not.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const LocalDaemonOptions& options);
  ~LocalDaemon();  // SIGTERM, then SIGKILL; removes the folder

  const DaemonSockets& sockets() const { return sockets_; }
  pid_t pid() const { return pid_; }
  uint16_t metrics_port() const { return metrics_port_; }  // 0: none
  // Returns how it ended by itself, with the last line that it logged; none while it runs.
  std::optional<std::string> Ended();

 private:
  LocalDaemon() = default;
  absl::Status Configure(const LocalDaemonOptions& options) const;
  absl::Status Launch(const LocalDaemonOptions& options);
  bool Serves();  // returns whether it serves a client, or a user without a tenant
  std::string Log() const;

  std::string folder_;
  DaemonSockets sockets_;
  pid_t pid_ = -1;
  uint16_t metrics_port_ = 0;
  std::optional<std::string> ended_;
};

}  // namespace ashlar::tools
