// A private ashlard for one run of a tool: started in a fresh folder under /tmp, gone without a trace afterwards.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace ashlar::tools {

struct LocalDaemonOptions {
  std::string binary;              // empty: `ashlard` beside the running program
  uint64_t dram_bytes = 2u << 30;  // capacity, all of it the caller's
  uint64_t hbm_bytes = 0;          // 0: no such tier
  uint64_t ssd_bytes = 0;          // 0: no such tier
  std::string ssd_folder;          // empty: in the daemon's own folder, gone with it
  std::string admission = "all";   // of the ssd tier
  uint32_t threads = 0;            // workers; 0: the daemon's default
};

class LocalDaemon {
 public:
  // Returns once the daemon accepts sessions. DEADLINE_EXCEEDED or what it logged, if it does not.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const LocalDaemonOptions& options);
  ~LocalDaemon();  // SIGTERM, then SIGKILL; removes the folder

  const ClientOptions& client_options() const { return client_options_; }
  pid_t pid() const { return pid_; }

 private:
  LocalDaemon() = default;
  absl::Status Spawn(const LocalDaemonOptions& options);
  std::string Log() const;

  std::string folder_;
  ClientOptions client_options_;
  pid_t pid_ = -1;
};

}  // namespace ashlar::tools
