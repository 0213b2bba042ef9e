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
// a subscriber: ZeroMQ drops what a slow one does not take, which the numbers show. Replays are sent in portions,
// between which it publishes; one whose reader takes nothing for kReplayPatience ends. What is kept goes with any
// forgetting of texts: replays then begin later.
class ZmqPublisher {
 public:
  struct Options {
    std::string address;         // "tcp://HOST:PORT" or "ipc://PATH"
    std::string replay_address;  // empty: none
    std::string topic;
    size_t kept = 10'000;                  // batches
    size_t most_bytes = size_t{64} << 20;  // of these, and of those that wait for one subscriber
  };
  static constexpr storage::Nanos kReplayPatience = 1'000'000'000;
  static constexpr size_t kMostReplays = 16;         // under way; further requests wait
  static constexpr size_t kMostReplayWaiting = 128;  // messages of a replay that its reader has not taken

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
