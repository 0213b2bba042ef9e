// ZmqPublisher: publishes events of prefixes' blocks over ZeroMQ, as vLLM's engines publish theirs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"

namespace ashlar::daemon {

// A PUB socket whose messages are topic, sequence number (8 bytes, big endian, from 0) and batch; a ROUTER socket that
// sends the kept batches from an asked sequence number on, and then one with number -1. One thread; it never waits for
// a subscriber: ZeroMQ drops what a slow one does not take, which the numbers show.
class ZmqPublisher {
 public:
  struct Options {
    std::string address;         // "tcp://HOST:PORT" or "ipc://PATH"
    std::string replay_address;  // empty: none
    std::string topic;
    size_t kept = 10'000;        // batches
    int most_waiting = 100'000;  // messages for one subscriber
  };

  // UNAVAILABLE: an address cannot be bound. `hub` and `texts` must outlive it.
  static absl::StatusOr<std::unique_ptr<ZmqPublisher>> Start(Options options, EventHub& hub, const BlockTexts& texts);
  ~ZmqPublisher();
  ZmqPublisher(const ZmqPublisher&) = delete;
  ZmqPublisher& operator=(const ZmqPublisher&) = delete;

  std::string address() const;  // as bound: of port 0 the chosen one
  std::string replay_address() const;
  uint64_t batches() const;

 private:
  struct Impl;
  explicit ZmqPublisher(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
