// SPDX-License-Identifier: Apache-2.0
// DirectoryProcess: a node's directory, driven in simulated time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "daemon/peer/directory/etcd_directory.h"
#include "tests/simulation/nodes/etcd_client.h"

namespace ashlar::simulation::nodes {

class DirectoryProcess {
 public:
  // All must outlive it. `incarnation`: 0: drawn. `stepped`: it has done something.
  DirectoryProcess(Network& network, Etcd& etcd, size_t machine, const std::shared_ptr<Life>& life,
                   const MachineClock& clock, const daemon::EtcdDirectoryOptions& options,
                   daemon::DirectoryEvents events, uint64_t incarnation, std::function<void()> stepped);

  daemon::EtcdDirectory& operator*() { return *directory_; }
  daemon::EtcdDirectory* operator->() { return directory_.get(); }
  void End() { directory_ = nullptr; }

 private:
  void Wake();
  void Step();

  Schedule& schedule_;
  const std::shared_ptr<Life> life_;
  const MachineClock& clock_;
  const std::function<void()> stepped_;
  std::unique_ptr<daemon::EtcdDirectory> directory_;
  bool woken_ = false;
  uint64_t waits_ = 0;  // a counter: a wait with an older value is void
};

}  // namespace ashlar::simulation::nodes
