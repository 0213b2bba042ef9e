// SPDX-License-Identifier: Apache-2.0
// ZmqPublisher: publishes events of prefix blocks over ZeroMQ in the way vLLM's engines do.
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
// the replay address get the kept batches from a requested sequence number, followed by a message with number −1. One
// thread serves all connections and never waits for one: each connection reads the kept batches at its own pace. A slow
// one misses dropped batches, which the sequence numbers show. Erasing texts drops all kept batches.
//
// The publisher implements ZMTP itself, because libzmq limits neither the number of connections nor the bytes that it
// receives (zmtp.h).
class ZmqPublisher {
 public:
  // Most connections of both addresses together. Beyond that, the peer address (or the user, for ipc) with the most
  // connections loses its oldest one.
  static constexpr size_t kConnections = 64, kConnectionsOfAnAddress = 16;

  struct Options {
    std::string address;         // "tcp://HOST:PORT" or "ipc://PATH"; HOST and PORT may be "*"
    std::string replay_address;  // empty: no replays
    std::string topic;
    size_t kept = 10'000;                       // batches
    size_t most_bytes = size_t{64} << 20;       // bytes of all kept batches
    std::chrono::milliseconds greeting{5'000};  // from a connection's start to the end of its greeting
  };

  // UNAVAILABLE if an address cannot be bound. `hub`, `texts` and `refused` must outlive the publisher.
  static absl::StatusOr<std::unique_ptr<ZmqPublisher>> Start(Options options, EventHub& hub, const BlockTexts& texts,
                                                             RefusedConnections& refused);
  ~ZmqPublisher();
  ZmqPublisher(const ZmqPublisher&) = delete;
  ZmqPublisher& operator=(const ZmqPublisher&) = delete;

  std::string address() const;  // bound address, with the port chosen for port 0
  std::string replay_address() const;
  uint64_t batches() const;

 private:
  struct Impl;
  explicit ZmqPublisher(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
