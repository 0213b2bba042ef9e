// SPDX-License-Identifier: Apache-2.0
// LocalNodes: the daemons of a cluster on this machine, with an etcd of their own, for one run of a program.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/testing/local_daemon.h"
#include "examples/testing/local_etcd.h"

namespace ashlar::tools {

class LocalNodes {
 public:
  // Starts `count` daemons, each with these options. One is a daemon alone, without etcd. The first error of any.
  static absl::StatusOr<std::unique_ptr<LocalNodes>> Start(size_t count, const LocalDaemonOptions& options) {
    return Start(std::vector<LocalDaemonOptions>(count, options));
  }
  // With options for each.
  static absl::StatusOr<std::unique_ptr<LocalNodes>> Start(std::vector<LocalDaemonOptions> options,
                                                           uint32_t lease_seconds = 3);
  // Ends one of them, and starts another one in its place.
  absl::Status Restart(size_t node);

  const LocalEtcd& etcd() const { return *etcd_; }  // only with several nodes
  size_t size() const { return daemons_.size(); }
  const LocalDaemon& daemon(size_t node) const { return *daemons_[node]; }

 private:
  LocalNodes() = default;

  std::vector<LocalDaemonOptions> options_;
  std::unique_ptr<LocalEtcd> etcd_;  // null: one daemon alone
  std::vector<std::unique_ptr<LocalDaemon>> daemons_;
};

}  // namespace ashlar::tools
