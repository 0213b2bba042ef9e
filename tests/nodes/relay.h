// SPDX-License-Identifier: Apache-2.0
// Relay: a switch in this process, whose links delay, lose, duplicate, reorder, throttle and cut what they carry.
//
// Each port is one end of a veth pair; the other end is a node's device. The relay reads raw frames of every port and
// writes them to the port of the node that they are for, which it finds by the last byte of the MAC address (MacOf).
// Each pair of ports has one link a direction, so that a network can be cut one way only.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/mutex.h"

namespace ashlar::nodes {

// One direction of one link. Probabilities are per frame.
struct LinkConditions {
  double loss = 0;
  double duplicate = 0;  // probability that a frame is delivered twice
  double reorder = 0;    // probability that a frame is held back, so that later frames overtake it
  std::chrono::microseconds hold_back{5'000};  // time that a reordered frame is held back
  std::chrono::microseconds delay{0};
  uint64_t bytes_per_second = 0;             // 0: no throttle
  std::chrono::microseconds queue{100'000};  // throttled links drop frames that would wait longer
  bool cut = false;                          // drops all frames, also those in flight

  bool operator==(const LinkConditions&) const = default;
};

// Frames of one direction of one link, since the start.
struct LinkCounts {
  uint64_t delivered = 0;  // including duplicates
  uint64_t bytes = 0;      // bytes of delivered frames
  uint64_t lost = 0, duplicated = 0, reordered = 0, cut = 0;
  uint64_t overflowed = 0;  // dropped because the throttle's queue or the port was full
};

class Relay {
 public:
  // Takes over `ports`, AF_PACKET sockets; frames have at most `mtu` bytes besides their Ethernet header.
  Relay(std::vector<int> ports, size_t mtu, uint64_t seed);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // On any thread. Takes effect immediately; frames in flight keep their arrival times.
  void Set(size_t from, size_t to, const LinkConditions& conditions);
  LinkCounts counts(size_t from, size_t to) const;
  uint64_t oversized() const { return oversized_; }  // frames larger than the MTU: an offload is on

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    LinkConditions conditions;
    LinkCounts counts;
    Clock::time_point free_at{};  // end of the transmission of all accepted frames on a throttled link
  };
  struct Frame {
    Clock::time_point due;
    uint64_t number;  // frames with the same due time leave in order of arrival
    Link* link;
    size_t port;
    std::vector<std::byte> bytes;
  };
  struct Later {
    bool operator()(const std::unique_ptr<Frame>& a, const std::unique_ptr<Frame>& b) const {
      return a->due != b->due ? a->due > b->due : a->number > b->number;
    }
  };
  struct Inbox;
  struct Outbox;

  void Run();
  void ReadPort(size_t from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Accept(size_t from, size_t to, const std::byte* frame, size_t bytes, Clock::time_point now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Happens(double probability);
  void Hold(Link& link, size_t port, const std::byte* frame, size_t bytes, Clock::time_point due);
  void DeliverDue();
  void Queue(Link& link, size_t port, const std::byte* frame, size_t bytes);
  void Flush(size_t port);
  Link& link(size_t from, size_t to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return links_[from * ports_.size() + to]; }

  const std::vector<int> ports_;
  const size_t frame_bytes_;  // the longest frame
  std::unique_ptr<Inbox> inbox_;
  std::vector<std::unique_ptr<Outbox>> outboxes_;
  int wake_ = -1;  // an eventfd that ends Run
  std::atomic<uint64_t> oversized_{0};
  mutable Mutex mutex_;
  std::vector<Link> links_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_;
  std::priority_queue<std::unique_ptr<Frame>, std::vector<std::unique_ptr<Frame>>, Later> held_;
  uint64_t next_number_ = 0;
  std::thread thread_;
};

// The address of a node's device: the relay reads the node's number from the last byte.
std::array<unsigned char, 6> MacOf(size_t node);

}  // namespace ashlar::nodes
