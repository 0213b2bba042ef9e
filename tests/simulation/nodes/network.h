// SPDX-License-Identifier: Apache-2.0
// Network: the links between machines of a simulation. Messages take time, overtake one another, wait while a link is
// cut and are sent again where they were lost, as TCP does it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tests/simulation/nodes/schedule.h"

namespace ashlar::simulation::nodes {

class Network {
 public:
  // One direction of a link.
  struct Link {
    bool cut = false;
    Nanos cut_at = 0;
    Nanos delay = 200 * kMicrosecond;  // lower bound
    Nanos jitter = kMillisecond;       // more, at most
    uint64_t lost_percent = 0;
  };

  Network(Schedule& schedule, size_t machines)
      : schedule_(schedule), machines_(machines), links_(machines * machines) {}

  Schedule& schedule() { return schedule_; }
  size_t machines() const { return machines_; }
  Link& link(size_t from, size_t to) { return links_[from * machines_ + to]; }
  void Cut(size_t from, size_t to) {
    if (!link(from, to).cut) link(from, to).cut_at = schedule_.now();
    link(from, to).cut = true;
  }
  void Heal(size_t from, size_t to) { link(from, to) = Link(); }
  void HealAll() { links_.assign(links_.size(), Link()); }
  // No link is cut, slow or lossy.
  bool calm() const {
    const Link whole;
    return std::ranges::all_of(links_, [&](const Link& one) {
      return !one.cut && one.lost_percent == 0 && one.delay <= whole.delay && one.jitter <= whole.jitter;
    });
  }
  // Returns whether one direction or the other has been cut without interruption since that time.
  bool Silent(size_t a, size_t b, Nanos since_long) {
    const auto silent = [&](const Link& one) { return one.cut && schedule_.now() - one.cut_at >= since_long; };
    return silent(link(a, b)) || silent(link(b, a));
  }
  // The one-way delay if nothing interferes.
  Nanos Journey(size_t from, size_t to) {
    const Link& over = link(from, to);
    return over.delay + schedule_.DrawTime(over.jitter + 1);
  }
  uint64_t lost = 0;  // lost frames, which are sent again

 private:
  Schedule& schedule_;
  const size_t machines_;
  std::vector<Link> links_;
};

// One direction of a connection: what is sent arrives once, unless the connection ends before.
class Wire : public std::enable_shared_from_this<Wire> {
 public:
  enum class Order { kKept, kAny };
  Wire(Network& network, size_t from, size_t to, Order order)
      : network_(network), from_(from), to_(to), order_(order) {}

  void Send(std::function<void()> arrive);
  // Nothing in flight arrives any longer.
  void Close() {
    closed_ = true;
    queue_.clear();
  }
  size_t under_way() const { return under_way_; }

 private:
  struct Item {
    Nanos ready;
    std::function<void()> arrive;
  };
  bool Passes();
  void SendAlone(Nanos wait, std::function<void()> arrive);
  void SendFirst();

  static constexpr Nanos kAgain = 200 * kMillisecond;  // before a lost segment is sent again

  Network& network_;
  const size_t from_, to_;
  const Order order_;
  bool closed_ = false;
  size_t under_way_ = 0;
  std::deque<Item> queue_;
};

}  // namespace ashlar::simulation::nodes
