// SPDX-License-Identifier: Apache-2.0
// Network: a switch, and nodes that each have their own network stack.
//
// The switch is also in a network namespace, so that the machine's own network is not involved. It is either a Relay,
// whose links a test breaks in operation, or the kernel's bridge, which is as fast as the machine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/network_namespace.h"
#include "tests/nodes/relay.h"

namespace ashlar::nodes {

struct NetworkOptions {
  size_t nodes = 2;   // at most 200
  bool relay = true;  // false: a bridge, without link conditions
  size_t mtu = 1500;  // bytes; larger frames give a relay more throughput
  uint64_t seed = 0;  // seed of the relay's random drops; 0: a random seed
};

class Network {
 public:
  // Returns why this is impossible here; empty: possible. Checks the machine once.
  static std::string WhyNot();

  // Failures are test failures. A failed test prints the seed.
  explicit Network(const NetworkOptions& options = {});
  ~Network();  // processes in the nodes keep their stacks but lose their links
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  size_t nodes() const { return nodes_.size(); }
  int stack(size_t node) const { return nodes_[node]->fd(); }  // descriptor of the network namespace
  std::string path(size_t node) const { return nodes_[node]->path(); }
  static std::string address(size_t node);  // IPv4

  // All of these are for a network with a relay. They may be called on any thread and take effect immediately.
  void SetLink(size_t from, size_t to, const LinkConditions& conditions);  // one direction
  void SetBetween(size_t a, size_t b, const LinkConditions& conditions);   // both directions
  void SetAround(size_t node, const LinkConditions& conditions);           // both directions, to all other nodes
  void SetAll(const LinkConditions& conditions);
  void Heal() { SetAll({}); }
  // Returns whether any link has ever lost, delayed or slowed frames, or been cut. A lease whose reply was lost or late
  // ends only when it expires, after a minute.
  bool disturbed() const { return disturbed_; }
  LinkCounts counts(size_t from, size_t to) const { return relay_->counts(from, to); }
  uint64_t oversized() const { return relay_->oversized(); }
  uint64_t seed() const { return seed_; }

 private:
  void Connect(const NetworkOptions& options);
  void StartRelay(const NetworkOptions& options);

  const uint64_t seed_;
  std::atomic<bool> disturbed_{false};
  integration::NetworkNamespace switch_;
  std::vector<std::unique_ptr<integration::NetworkNamespace>> nodes_;
  std::unique_ptr<Relay> relay_;
};

// The environment (NAME=VALUE) that shifts a program's clock of the day by an offset, such as `+1h` or `-90m`; its
// other clocks are not affected. Empty if this is impossible: Debian's faketime is not installed, or sanitizers must be
// loaded first.
std::vector<std::string> ClockOff(const std::string& offset);

}  // namespace ashlar::nodes
