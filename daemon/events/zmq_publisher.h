// SPDX-License-Identifier: Apache-2.0
// ZmqPublisher: publishes events of prefixes' blocks as vLLM's engines publish theirs, to ZeroMQ's sockets.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"
#include "daemon/runtime/refused_connections.h"

namespace ashlar::daemon {

// SUB sockets get messages of topic, sequence number (8 bytes, big endian, from 0) and batch. REQ and DEALER sockets at
// the replay address get the kept batches from a requested sequence number on, and then one with number -1. One thread
// serves all of them, and never waits for any: each reads the kept batches at its own pace, and misses those that are
// no longer kept, which the numbers show. Erasing texts drops all kept batches.
//
// It speaks ZMTP itself, because libzmq bounds neither connections nor the bytes of what it receives (zmtp.h).
class ZmqPublisher {
 public:
  // Connections of both addresses together. Beyond kConnections, the address (or user of an ipc socket) with the most
  // loses its oldest.
  static constexpr size_t kConnections = 64, kConnectionsOfAnAddress = 16;

  struct Options {
    std::string address;         // "tcp://HOST:PORT" or "ipc://PATH"; HOST and PORT may be "*"
    std::string replay_address;  // empty: none
    std::string topic;
    size_t kept = 10'000;                       // batches
    size_t most_bytes = size_t{64} << 20;       // of these
    std::chrono::milliseconds greeting{5'000};  // from a connection's start to the end of its greeting
  };

  // UNAVAILABLE: an address cannot be bound. `hub`, `texts` and `refused` must outlive it.
  static absl::StatusOr<std::unique_ptr<ZmqPublisher>> Start(Options options, EventHub& hub, const BlockTexts& texts,
                                                             RefusedConnections& refused);
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
