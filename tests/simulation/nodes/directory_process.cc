// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/directory_process.h"

#include <utility>

#include "daemon/peer/directory/directory_session.h"
#include "tests/simulation/nodes/calls.h"
#include "tests/simulation/nodes/fabric.h"

namespace ashlar::simulation::nodes {

DirectoryProcess::DirectoryProcess(Network& network, Etcd& etcd, size_t machine, const std::shared_ptr<Life>& life,
                                   const MachineClock& clock, const daemon::EtcdDirectoryOptions& options,
                                   daemon::DirectoryEvents events, uint64_t incarnation, std::function<void()> stepped)
    : schedule_(network.schedule()), life_(life), clock_(clock), stepped_(std::move(stepped)) {
  auto client = std::make_unique<SimulatedEtcdClient>(network, etcd, machine, life, clock,
                                                      daemon::DirectorySession::Limits(options), [this] { Wake(); });
  const daemon::Member self{.node = Calls::NameOf(machine),
                            .control_address = Fabric::AddressOf(machine) + ":7461",
                            .transport_address = Fabric::AddressOf(machine) + ":7462",
                            .version = "simulated"};
  bool first = true;
  directory_ = std::make_unique<daemon::EtcdDirectory>(
      options, self, std::move(events), clock, std::move(client), [this, incarnation, &first] {
        const uint64_t drawn = schedule_.Random();
        return std::exchange(first, false) && incarnation != 0 ? incarnation : drawn;
      });
  Wake();
}

void DirectoryProcess::Wake() {
  if (life_->ended || std::exchange(woken_, true)) return;
  ++waits_;
  schedule_.For(life_, schedule_.DrawTime(100 * kMicrosecond), [this] { Step(); });
}

void DirectoryProcess::Step() {
  woken_ = false;
  const Nanos wait = clock_.Until(directory_->Step());
  stepped_();
  if (woken_ || wait == INT64_MAX) return;
  schedule_.For(life_, wait, [this, number = ++waits_] {
    if (number == waits_) Wake();
  });
}

}  // namespace ashlar::simulation::nodes
