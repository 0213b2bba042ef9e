// LocalNodes: the daemons of a cluster on this machine, with an etcd of their own, for one run of a program.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/local_daemon/local_daemon.h"
#include "examples/local_daemon/local_etcd.h"

namespace ashlar::tools {

class LocalNodes {
 public:
  // Starts `count` daemons, each with these options. One is a daemon alone, without etcd. The first error of any.
  static absl::StatusOr<std::unique_ptr<LocalNodes>> Start(size_t count, const LocalDaemonOptions& options);

  size_t size() const { return daemons_.size(); }
  const LocalDaemon& daemon(size_t node) const { return *daemons_[node]; }

 private:
  LocalNodes() = default;

  std::unique_ptr<LocalEtcd> etcd_;  // null: one daemon alone
  std::vector<std::unique_ptr<LocalDaemon>> daemons_;
};

}  // namespace ashlar::tools
